// The page: one chat is shown, and any number of chats are being answered.

import { Answering } from "./answering.js";
import { add, merge, newChat, newMessage, show, shown } from "./chat.js";
import { ChatList } from "./chat_list.js";
import { Conversation } from "./conversation.js";
import { byId, fitHeight, isSending, make } from "./dom.js";
import { save } from "./export.js";
import { browserKeeps, tabKeeps } from "./kept_texts.js";
import { setPlain } from "./markdown.js";
import { notify, say, settle, speak } from "./notices.js";
import { Away, Refused, isUp, models, parseMarkdown, setKey } from "./server.js";
import { SettingsForm, firstProblem } from "./settings.js";
import { Storage } from "./storage.js";

/** @typedef {import("./chat.js").Chat} Chat */
/** @typedef {import("./chat.js").Message} Message */

const NAME = "granite4-neuron";
const SAVE_EVERY = 1000; // milliseconds, while an answer grows
const FIRST_RETRY = 1000; // milliseconds until the page looks whether the server is back
const LONGEST_RETRY = 15000;

/** @type {Storage | null} null where the browser keeps nothing */
let storage = null;
/** @type {import("./storage.js").Summary[]} */
let summaries = [];
/** @type {string[]} */
let modelNames = [];
/** @type {Map<string, Answering>} by the ids of chats */
const answerings = new Map();
/** @type {Map<string, string>} why the last question of a chat has no answer, by its id */
const failures = new Map();
/** @type {Map<string, Chat>} chats that are not only in the storage */
const chats = new Map();
let chat = newChat(lastSettings());
let isAway = false;
let shownModels = "";

const settingsForm = new SettingsForm((settings) => {
  chat.settings = { ...settings, model: chat.settings.model ?? "" };
  browserKeeps.set("settings", JSON.stringify(chat.settings));
  if (chat.leaf) keep(chat);
});
const list = new ChatList({ open: (id) => (location.hash = id), rename, remove });
const conversation = new Conversation({
  regenerate: (message) => ask(chat, message.parent),
  proceed: (message) => ask(chat, message.id, true),
  edit: (message, text) => ask(chat, addQuestion(text, message.parent)),
  retry: () => ask(chat, chat.leaf),
  choose(message) {
    show(chat, message.id);
    failures.delete(chat.id);
    keep(chat);
    draw();
    conversation.focusVersions(message);
  },
});

start();

async function start() {
  listen();
  setTheme(browserKeeps.get("theme"));
  setAnswers(browserKeeps.get("answers"));
  byId("key").value = tabKeeps.get("API key");
  setKey(byId("key").value);
  const connected = connect();
  try {
    storage = await Storage.open(changedElsewhere);
    summaries = await storage.list();
  } catch {
    byId("no-chats").textContent = "";
    notify("storage", "This browser keeps nothing for this page: a chat is lost when the page is closed.");
  }
  await open(location.hash.slice(1));
  await connected;
}

// Sending and answering.

/**
 * Take the message that was typed, and answer it.
 */
function send() {
  const text = byId("text").value;
  if (!text.trim()) return;
  if (answerings.has(chat.id)) return say("An answer is still being written. Escape stops it.");
  if (!settingsAreRight()) return;
  byId("text").value = "";
  keepDraft();
  ask(chat, addQuestion(text, chat.leaf));
}

/**
 * @param {string} text
 * @param {string | null} parent
 */
function addQuestion(text, parent) {
  const question = newMessage("user", text, parent);
  add(chat, question);
  return question.id;
}

/**
 * Answer a chat up to a message, or continue that message.
 * @param {Chat} asked
 * @param {string | null} leaf the id of the message
 * @param {boolean} isContinuing
 */
async function ask(asked, leaf, isContinuing = false) {
  await stop(asked.id);
  failures.delete(asked.id);
  chats.set(asked.id, asked);
  asked.updated = Date.now();
  keep(asked);
  if (!settingsAreRight()) return draw();
  const before = asked.leaf;
  asked.leaf = leaf;
  const answering = new Answering(asked, shown(asked), isContinuing, modelOf(asked));
  answerings.set(asked.id, answering);
  draw();
  conversation.toEnd();
  byId("text").focus();
  say("");
  speak("Waiting for the answer");
  await follow(answering);
  answerings.delete(asked.id);
  // Without an answer, what was shown before is shown again.
  if (answering.isWaiting && asked.leaf === leaf) asked.leaf = before;
  keep(asked);
  if (asked !== chat) return list.show(summaries, chat.id, isAnswering);
  draw();
  say(answering.message.end === "stopped" ? "Stopped." : "");
}

/**
 * Show and keep an answer while it grows.
 * @param {Answering} answering
 */
async function follow(answering) {
  const asked = answering.chat;
  let saved = performance.now();
  try {
    await answering.run(() => {
      takeUp(answering);
      if (asked === chat && !answering.isWaiting) conversation.grow(answering);
      if (performance.now() - saved < SAVE_EVERY) return;
      saved = performance.now();
      keep(asked);
    });
    takeUp(answering);
  } catch (error) {
    fail(asked, /** @type {Error} */ (error));
  }
}

/**
 * Make an answer a part of its chat, once there is some of it. It is shown, unless the person looks at another version meanwhile.
 * @param {Answering} answering
 */
function takeUp({ chat: asked, message, isWaiting }) {
  if (isWaiting || asked.messages[message.id]) return;
  const { leaf } = asked;
  add(asked, message);
  if (leaf !== message.parent) asked.leaf = leaf;
  if (asked === chat) draw();
}

/**
 * Show why a chat has no answer, or only a part of it.
 * @param {Chat} asked
 * @param {Error} error
 */
function fail(asked, error) {
  if (error instanceof Away) return wait();
  if (!(error instanceof Refused)) throw error;
  if (error.status === 401) return askForKey();
  failures.set(asked.id, error.message);
  if (asked === chat) speak(error.message);
}

/**
 * Stop the answer of a chat, and wait until what there is of it belongs to the chat.
 * @param {string} id
 */
async function stop(id) {
  // Whoever waits here too may have begun another one.
  for (let answering; (answering = answerings.get(id)); await new Promise((resolve) => setTimeout(resolve, 10))) {
    answering.stop();
  }
}

function settingsAreRight() {
  const wrong = firstProblem(chat.settings);
  if (!wrong) return true;
  settingsForm.open(wrong.name);
  say(wrong.problem);
  return false;
}

/** @param {string} id */
function isAnswering(id) {
  return answerings.has(id);
}

// The server.

/** Ask the server for its models. */
async function connect() {
  try {
    modelNames = await models();
    for (const name of ["away", "key", "models"]) settle(name);
    isAway = false;
    conversation.showAgain();
    parseMarkdown("").catch(() => {}); // starts the server's parser, so that the first answer does not wait for it
  } catch (error) {
    if (error instanceof Away) wait();
    else if (error instanceof Refused && error.status === 401) askForKey();
    else if (error instanceof Refused) notify("models", error.message);
    else throw error;
  }
  drawModels();
}

/** Say that the server is away, and look from time to time whether it is back. */
async function wait() {
  if (isAway) return;
  isAway = true;
  const text = "The server does not answer. Nothing that you wrote is lost. The page looks every few seconds whether it is back.";
  notify("away", text, { label: "Look now", onClick: returned });
  for (let pause = FIRST_RETRY; isAway; pause = Math.min(2 * pause, LONGEST_RETRY)) {
    await new Promise((resolve) => setTimeout(resolve, pause));
    await returned();
  }
}

async function returned() {
  if (!isAway || !(await isUp())) return;
  await connect();
  if (!isAway) say("The server is back.");
}

function askForKey() {
  const onClick = () => settingsForm.open("key");
  const text = byId("key").value ? "The server does not accept this API key." : "This server needs an API key.";
  notify("key", text, { label: "Enter the key", onClick });
}

/** Take the key that was typed, if it is another one. */
function takeKey() {
  const typed = byId("key").value;
  if (typed === tabKeeps.get("API key")) return;
  tabKeeps.set("API key", typed);
  setKey(typed);
  connect();
}

/**
 * The model that answers a chat.
 * @param {Chat} asked
 */
function modelOf(asked) {
  const wanted = asked.settings.model;
  return modelNames.includes(wanted) ? wanted : (modelNames[0] ?? wanted);
}

// The chats.

/**
 * Show a chat.
 * @param {string} id "" for a new one
 */
async function open(id) {
  const kept = chats.get(id) ?? (id && storage ? await storage.load(id) : undefined);
  if (location.hash.slice(1) !== id) return; // another one was opened meanwhile
  if (id && !kept) history.replaceState(null, "", location.pathname);
  chat = kept ?? newChat(lastSettings());
  if (kept) chats.set(id, chat);
  settingsForm.fill(chat.settings);
  byId("text").value = tabKeeps.get(`draft ${kept ? id : ""}`);
  fitHeight(byId("text"));
  closeSidebar();
  say("");
  draw();
  conversation.toEnd();
  if (!matchMedia("(pointer: coarse)").matches) byId("text").focus();
}

/**
 * Keep a chat in the browser, and list it.
 * @param {Chat} kept
 */
async function keep(kept) {
  if (kept === chat && !location.hash) history.replaceState(null, "", `#${kept.id}`);
  summarize(kept);
  list.show(summaries, chat.id, isAnswering);
  try {
    await storage?.save(kept);
    settle("storage-full");
  } catch {
    notify("storage-full", "The browser has no room for this chat: it is lost when the page is closed. Delete other chats.");
  }
}

/**
 * Note what the list shows of a chat.
 * @param {Chat} changed
 */
function summarize({ id, title, updated }) {
  summaries = [{ id, title, updated }, ...summaries.filter((summary) => summary.id !== id)];
  summaries.sort((one, other) => other.updated - one.updated);
}

/**
 * @param {string} id
 * @param {string} title
 */
function rename(id, title) {
  for (const each of [summaries.find((summary) => summary.id === id), chats.get(id)]) if (each) each.title = title;
  storage?.rename(id, title);
  draw();
}

/**
 * Delete a chat. It comes back by a button for as long as the notice is there.
 * @param {string} id
 */
async function remove(id) {
  await stop(id);
  const removed = chats.get(id) ?? (await storage?.load(id));
  forget(id);
  await storage?.remove(id);
  if (!removed) return;
  const restore = () => {
    settle("deleted");
    chats.set(id, removed);
    keep(removed);
    location.hash = id;
  };
  notify("deleted", `“${removed.title}” is deleted.`, { label: "Undo", onClick: restore });
}

/** @param {string} id */
function forget(id) {
  summaries = summaries.filter((summary) => summary.id !== id);
  chats.delete(id);
  tabKeeps.set(`draft ${id}`, "");
  if (chat.id === id) location.hash = "";
  list.show(summaries, chat.id, isAnswering);
}

/**
 * Another tab has changed or deleted a chat.
 * @param {string} id
 */
async function changedElsewhere(id) {
  const stored = await storage?.load(id);
  if (!stored) return answerings.has(id) ? undefined : forget(id);
  summarize(stored);
  const mine = chats.get(id);
  if (mine) {
    merge(mine, stored);
    mine.title = stored.title;
    if (!answerings.has(id) && mine.leaf) show(mine, mine.leaf);
  }
  draw();
}

// What is shown.

function draw() {
  document.title = chat.title ? `${chat.title} - ${NAME}` : NAME;
  const answering = answerings.get(chat.id);
  conversation.show(chat, answering, failures.get(chat.id) ?? "");
  list.show(summaries, chat.id, isAnswering);
  drawModels();
  byId("send").hidden = Boolean(answering);
  byId("stop").hidden = !answering;
  byId("open-export").disabled = !chat.leaf;
}

function drawModels() {
  const choices = JSON.stringify([modelNames, chat.id, chat.settings.model]);
  if (choices === shownModels) return; // somebody may be choosing
  shownModels = choices;
  const select = byId("model");
  const missing = chat.settings.model && modelNames.length && !modelNames.includes(chat.settings.model);
  select.replaceChildren(...modelNames.map((name) => make("option", { value: name, textContent: name })));
  if (!modelNames.length) select.append(make("option", { textContent: "no model" }));
  select.value = modelNames.length ? modelOf(chat) : "no model";
  select.disabled = !modelNames.length;
  if (missing) notify("model", `The server has no ${chat.settings.model} now: ${modelOf(chat)} answers.`);
  else settle("model");
}

/** @param {string} theme "light", "dark", or "" for the system's */
function setTheme(theme) {
  byId("theme").value = theme;
  document.documentElement.dataset.theme = theme;
}

/** @param {string} kind "plain" for answers as they are, "" for Markdown */
function setAnswers(kind) {
  byId("answers").value = kind;
  setPlain(kind === "plain");
  conversation.showAgain();
}

function openSidebar() {
  document.body.dataset.sidebar = "open";
  byId("open-sidebar").setAttribute("aria-expanded", "true");
  byId("new").focus();
}

function closeSidebar() {
  delete document.body.dataset.sidebar;
  byId("open-sidebar").setAttribute("aria-expanded", "false");
}

// What the person does.

function listen() {
  byId("ask").addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    send();
  });
  byId("text").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (!isSending(event)) return;
    event.preventDefault();
    send();
  });
  byId("text").addEventListener("input", () => {
    fitHeight(byId("text"));
    keepDraft();
  });
  byId("stop").addEventListener("click", () => {
    stop(chat.id);
    byId("text").focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open], :popover-open")) return;
    if (document.body.dataset.sidebar) {
      closeSidebar();
      byId("open-sidebar").focus();
    } else {
      stop(chat.id);
    }
  });
  byId("new").addEventListener("click", () => {
    if (location.hash) location.hash = "";
    else open("");
  });
  byId("open-sidebar").addEventListener("click", openSidebar);
  byId("close-sidebar").addEventListener("click", closeSidebar);
  document.addEventListener("click", (/** @type {any} */ event) => {
    if (!event.target.closest("#sidebar, #open-sidebar")) closeSidebar(); // beside it
  });
  byId("model").addEventListener("change", () => {
    chat.settings.model = byId("model").value;
    browserKeeps.set("settings", JSON.stringify(chat.settings));
    settle("model");
    if (chat.leaf) keep(chat);
  });
  byId("export").addEventListener("toggle", () => {
    const { left, bottom } = byId("open-export").getBoundingClientRect();
    Object.assign(byId("export").style, { left: `${left}px`, top: `${bottom + 4}px` });
  });
  byId("export").addEventListener("click", (/** @type {any} */ event) => {
    if (event.target.value) save(chat, event.target.value);
    byId("export").hidePopover();
  });
  byId("answers").addEventListener("change", () => {
    browserKeeps.set("answers", byId("answers").value);
    setAnswers(byId("answers").value);
  });
  byId("theme").addEventListener("change", () => {
    browserKeeps.set("theme", byId("theme").value);
    setTheme(byId("theme").value);
  });
  byId("key").addEventListener("change", takeKey);
  byId("settings").addEventListener("close", takeKey);
  window.addEventListener("hashchange", () => open(location.hash.slice(1)));
  window.addEventListener("online", returned);
  window.addEventListener("pagehide", () => answerings.forEach((answering) => keep(answering.chat)));
  setInterval(() => {
    const answering = answerings.get(chat.id);
    if (answering?.isWaiting) conversation.showProgress(answering);
  }, 1000);
}

// What is typed is kept in this tab, and settings in this browser.

function keepDraft() {
  tabKeeps.set(`draft ${chat.leaf ? chat.id : ""}`, byId("text").value);
  fitHeight(byId("text"));
}

/** @returns {import("./settings.js").Settings} */
function lastSettings() {
  return JSON.parse(browserKeeps.get("settings") || "{}");
}
