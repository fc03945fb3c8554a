// A chat: what was said, as a tree. A question that was edited, or an answer that was generated again, is a further child of
// the message before it, so nothing is lost.

/**
 * end: why the text ends: "stop" and "length" are the server's, "stopped" is the person's, "broken" a lost connection.
 *   Without it the answer is not finished. thought: what the model thought before the answer.
 * @typedef {{
 *   id: string, parent: string | null, role: "user" | "assistant", content: string, updated: number,
 *   thought?: string, model?: string, end?: string, speed?: string,
 * }} Message
 *
 * leaf: the last message of those that are shown.
 * @typedef {{
 *   id: string, title: string, updated: number, leaf: string | null, messages: Record<string, Message>,
 *   settings: import("./settings.js").Settings,
 * }} Chat
 */

const TITLE_LENGTH = 60;

/**
 * @param {import("./settings.js").Settings} settings
 * @returns {Chat}
 */
export function newChat(settings) {
  return { id: newId(), title: "", updated: Date.now(), leaf: null, messages: {}, settings: { ...settings } };
}

// crypto.randomUUID is there only on this machine and over TLS.
function newId() {
  return Array.from(crypto.getRandomValues(new Uint32Array(3)), (part) => part.toString(36)).join("");
}

/**
 * @param {"user" | "assistant"} role
 * @param {string} content
 * @param {string | null} parent
 * @returns {Message}
 */
export function newMessage(role, content, parent) {
  return { id: newId(), parent, role, content, updated: Date.now() };
}

/**
 * Add a message, and show it as the last one.
 * @param {Chat} chat
 * @param {Message} message
 */
export function add(chat, message) {
  chat.messages[message.id] = message;
  chat.leaf = message.id;
  chat.title ||= titleOf(message.content);
}

/**
 * A message as a request has it. The model's chat template decides which thoughts the model sees again.
 * @param {Message} message
 */
export function asRequested({ role, content, thought }) {
  return { role, content, ...(thought ? { reasoning_content: thought } : {}) };
}

/** @param {string} text */
function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH)}…` : line;
}

/**
 * The messages that are shown, from the first one to the leaf.
 * @param {Chat} chat
 * @returns {Message[]}
 */
export function shown(chat) {
  const path = [];
  for (let id = chat.leaf; id !== null; id = chat.messages[id].parent) path.unshift(chat.messages[id]);
  return path;
}

/**
 * The versions of a message, itself among them, in the order in which they were made.
 * @param {Chat} chat
 * @param {Message} message
 */
export function versions(chat, message) {
  return children(chat, message.parent);
}

/**
 * Show a version of a message, with what was said last after it.
 * @param {Chat} chat
 * @param {string} id
 */
export function show(chat, id) {
  chat.leaf = id;
  for (let last; (last = children(chat, chat.leaf).at(-1)); ) chat.leaf = last.id;
}

/**
 * @param {Chat} chat
 * @param {string | null} parent
 */
function children(chat, parent) {
  return Object.values(chat.messages).filter((message) => message.parent === parent);
}

/**
 * Add what another tab has written to a chat. Each message is as it was written last.
 * @param {Chat} chat
 * @param {Chat} other
 */
export function merge(chat, other) {
  for (const message of Object.values(other.messages)) {
    const mine = chat.messages[message.id];
    if (!mine) chat.messages[message.id] = message;
    else if (message.updated > mine.updated) Object.assign(mine, message);
  }
}
