// Shows the messages of a chat.

import { shown, versions } from "./chat.js";
import { button, byId, fitHeight, isSending, make } from "./dom.js";
import { MarkdownView, copy } from "./markdown.js";
import { speak } from "./notices.js";
import { ThoughtView } from "./thought.js";

/** @typedef {import("./chat.js").Chat} Chat */
/** @typedef {import("./chat.js").Message} Message */
/** @typedef {import("./answering.js").Answering} Answering */

/**
 * What the buttons of messages do.
 * @typedef {{
 *   regenerate: (message: Message) => void, proceed: (message: Message) => void,
 *   edit: (message: Message, text: string) => void, choose: (message: Message) => void, retry: () => void,
 * }} Actions
 */

const NEAR_END = 60; // pixels
/** @type {Record<string, string>} */
const ENDS = { stop: "", length: "Ended at the limit of tokens.", stopped: "Stopped.", broken: "The connection broke." };
const NO_END = "Not finished.";

export class Conversation {
  /** @param {Actions} actions */
  constructor(actions) {
    this._actions = actions;
    this._messages = make("div", { className: "messages" });
    this._unanswered = make("p", { className: "unanswered" });
    const keys = make("span", { className: "keys" }, "Enter sends, Shift+Enter begins a line, Escape stops an answer.");
    this._empty = make("p", { className: "empty" }, make("strong", {}, "What would you like to know?"), keys);
    byId("log").append(this._empty, this._messages, this._unanswered);
    /** @type {Map<string, MessageView>} by the ids of messages */
    this._views = new Map();
    this._chat = "";
    this._followEnd();
  }

  /**
   * Show a chat as it is now.
   * @param {Chat} chat
   * @param {Answering | undefined} answering
   * @param {string} failure why the last question has no answer
   */
  show(chat, answering, failure) {
    const messages = shown(chat);
    if (answering?.isWaiting && messages.at(-1)?.id === answering.message.parent) messages.push(answering.message);
    if (chat.id !== this._chat) {
      this._views.clear();
      this._messages.replaceChildren();
      this._chat = chat.id;
      this.toEnd();
    }
    this._empty.hidden = messages.length > 0;
    this._place(messages);
    messages.forEach((message, i) => {
      const mine = answering?.message === message ? answering : undefined;
      this._view(message).refresh(versions(chat, message), i === messages.length - 1, mine);
    });
    this._showUnanswered(messages, answering, failure);
    this._parse(messages.filter((message) => message !== answering?.message));
  }

  /**
   * Show for how long an answer has been waited for.
   * @param {Answering} answering
   */
  showProgress(answering) {
    this._view(answering.message).showProgress(answering);
  }

  /**
   * Show what there is of an answer.
   * @param {Answering} answering
   */
  grow(answering) {
    this._view(answering.message).grow(answering);
  }

  /** Show all answers again: the server is back, or they are to be shown in another way. */
  showAgain() {
    for (const view of this._views.values()) view.showAgain();
  }

  /** Go to the end, and stay there while the conversation grows. */
  toEnd() {
    this._isAtEnd = true;
    byId("log").scrollTop = byId("log").scrollHeight;
  }

  /**
   * Focus the buttons for versions of a message.
   * @param {Message} message
   */
  focusVersions(message) {
    /** @type {any} */ (this._view(message).element.querySelector(".versions button:not([disabled])"))?.focus();
  }

  _followEnd() {
    const log = byId("log");
    const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
    const showButton = () => (byId("to-end").hidden = this._isAtEnd);
    this._isAtEnd = true;
    log.addEventListener("scroll", () => {
      this._isAtEnd = atEnd();
      showButton();
    });
    const observer = new ResizeObserver(() => {
      if (this._isAtEnd) log.scrollTop = log.scrollHeight;
      showButton();
    });
    for (const element of [log, this._messages, this._unanswered]) observer.observe(element);
    byId("to-end").addEventListener("click", () => {
      this.toEnd();
      byId("text").focus();
    });
  }

  /**
   * Put the views of messages into the page; those that are there already stay where they are.
   * @param {Message[]} messages
   */
  _place(messages) {
    const wanted = new Set(messages.map((message) => this._view(message).element));
    for (const element of [...this._messages.children]) if (!wanted.has(element)) element.remove();
    this._messages.append(...[...wanted].slice(this._messages.childElementCount));
  }

  /** @param {Message} message */
  _view(message) {
    let view = this._views.get(message.id);
    if (!view || view.message !== message) {
      view?.element.remove();
      view = new MessageView(message, this._actions);
      this._views.set(message.id, view);
    }
    return view;
  }

  /**
   * @param {Message[]} messages
   * @param {Answering | undefined} answering
   * @param {string} failure
   */
  _showUnanswered(messages, answering, failure) {
    this._unanswered.hidden = Boolean(answering) || (messages.at(-1)?.role !== "user" && !failure);
    if (this._unanswered.hidden) return;
    const text = make("span", { className: failure ? "wrong" : "faint", textContent: failure || "Not answered." });
    this._unanswered.replaceChildren(text);
    if (messages.at(-1)?.role === "user") {
      this._unanswered.append(button("Try again", this._actions.retry, { id: "retry" }));
    }
  }

  /**
   * Parse the answers that have not been parsed as they are now, one after the other. The last one is the first: it is in view.
   * @param {Message[]} messages
   */
  async _parse(messages) {
    const chat = this._chat;
    for (const message of [...messages].reverse()) {
      if (chat === this._chat) await this._view(message).parse();
    }
  }
}

class MessageView {
  /**
   * @param {Message} message
   * @param {Actions} actions
   */
  constructor(message, actions) {
    this.message = message;
    this._actions = actions;
    this._isParsed = this._isGrowing = false;
    this._drawn = ""; // what the buttons were made from
    this._content = make("div", { className: "content" });
    this._tools = make("div", { className: "tools" });
    const speaker = message.role === "user" ? "You" : "Answer";
    this.element = make("article", { className: `message ${message.role}`, "aria-label": speaker });
    this.element.append(this._content, this._tools);
    if (message.role === "user") {
      this._content.append(make("p", { className: "as-typed", dir: "auto", textContent: message.content }));
    } else {
      this._thought = new ThoughtView();
      this.element.prepend(this._thought.element);
      this._markdown = new MarkdownView(this._content, speak);
    }
  }

  /**
   * Show the buttons that there are now.
   * @param {Message[]} versions
   * @param {boolean} isLast
   * @param {Answering | undefined} answering this message
   */
  refresh(versions, isLast, answering) {
    const { message, _actions: actions } = this;
    this._showThought(Boolean(answering));
    // The same buttons stay: somebody may be about to click on one, or have the focus on it.
    const drawn = JSON.stringify([versions.map(({ id }) => id), isLast, this._remark(), Boolean(answering)]);
    if (drawn === this._drawn) return;
    this._drawn = drawn;
    this.element.setAttribute("aria-busy", String(Boolean(answering)));
    if (answering) return this.showProgress(answering);
    const tools = [];
    if (versions.length > 1) tools.push(this._versions(versions));
    const copying = button("Copy", () => copy(message.content, copying));
    tools.push(copying);
    if (message.role === "user") {
      tools.push(button("Edit", () => this._edit(), { className: "edit" }));
    } else {
      tools.push(button("Regenerate", () => actions.regenerate(message), { className: "regenerate" }));
      if (isLast && message.end !== "stop") {
        tools.push(button("Continue", () => actions.proceed(message), { className: "continue" }));
      }
      tools.push(make("span", { className: "faint", textContent: this._remark() }));
    }
    this._tools.replaceChildren(...tools);
  }

  /** @param {Answering} answering */
  grow(answering) {
    this._isGrowing = this._isParsed = true;
    this._showThought(true);
    this._markdown?.grow(this.message.content);
    this.showProgress(answering);
  }

  /** @param {boolean} isAnswering whether the message is being written */
  _showThought(isAnswering) {
    const { thought = "", content } = this.message;
    this._thought?.show(thought, isAnswering && !content);
  }

  /** Parse the message's text if it has not been parsed. */
  async parse() {
    if (!this._markdown || (this._isParsed && this._parsed === this.message.content)) return;
    this._isParsed = true;
    this._isGrowing = false;
    this._parsed = this.message.content;
    await this._markdown.finish(this.message.content);
  }

  showAgain() {
    if (this._isParsed && !this._isGrowing) this._markdown?.finish(this.message.content);
  }

  _remark() {
    const { content, end, model, speed } = this.message;
    const ending = end === undefined ? NO_END : content || end !== "stop" ? (ENDS[end] ?? end) : "The answer is empty.";
    return [ending, [model, speed].filter(Boolean).join(": ")].filter(Boolean).join(" ");
  }

  /** @param {Answering} answering */
  showProgress(answering) {
    if (!answering.isWaiting) {
      this._tools.replaceChildren(make("span", { className: "faint", textContent: this.message.speed ?? "" }));
      return;
    }
    const seconds = Math.floor((performance.now() - answering.started) / 1000);
    const dots = make("span", { className: "waiting", "aria-hidden": "true" }, ...[0, 1, 2].map(() => make("i")));
    const text = `Waiting for the answer${seconds >= 2 ? `, ${seconds} s` : ""}`;
    if (!this._tools.querySelector(".waiting")) this._tools.replaceChildren(dots, make("span", { className: "faint" }));
    this._tools.lastElementChild.textContent = text;
  }

  /** @param {Message[]} all */
  _versions(all) {
    const at = all.indexOf(this.message);
    const to = (/** @type {number} */ i, /** @type {string} */ sign, /** @type {string} */ label) =>
      button(sign, () => this._actions.choose(all[i]), { disabled: !all[i], "aria-label": label });
    const number = make("span", { textContent: `${at + 1}/${all.length}` });
    const [earlier, later] = [to(at - 1, "‹", "Earlier version"), to(at + 1, "›", "Later version")];
    return make("span", { className: "versions", role: "group", "aria-label": "Versions" }, earlier, number, later);
  }

  /** Let the person edit the question in its place. */
  _edit() {
    const field = make("textarea", { value: this.message.content, dir: "auto", "aria-label": "Edit the message" });
    const end = () => {
      form.remove();
      this._content.hidden = this._tools.hidden = false;
    };
    const send = () => {
      if (!field.value.trim()) return;
      end();
      this._actions.edit(this.message, field.value);
    };
    const cancel = () => {
      end();
      this._tools.querySelector(".edit")?.focus();
    };
    const buttons = make("div", { className: "tools" }, button("Send", send, { className: "main" }));
    buttons.append(button("Cancel", cancel));
    const form = make("div", { className: "editing" }, field, buttons);
    field.addEventListener("input", () => fitHeight(field));
    field.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Escape") cancel();
      else if (isSending(event)) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this._content.hidden = this._tools.hidden = true;
    this.element.append(form);
    fitHeight(field);
    field.focus();
  }
}
