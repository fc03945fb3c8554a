// Saves the messages that a chat shows as a file.

import { asRequested, shown } from "./chat.js";
import { make } from "./dom.js";

/** @typedef {import("./chat.js").Chat} Chat */

/** @param {Chat} chat */
function asMarkdown(chat) {
  const system = chat.settings.system?.trim() ? [`**System**\n\n${chat.settings.system.trim()}`] : [];
  const said = shown(chat).map((message) => {
    const speaker = `**${message.role === "user" ? "You" : (message.model ?? "Model")}**`;
    const thought = message.thought ? [quoted(message.thought.trim())] : [];
    return [speaker, ...thought, message.content.trim()].join("\n\n");
  });
  return `${[`# ${chat.title}`, ...system, ...said].join("\n\n")}\n`;
}

/** @param {string} text */
function quoted(text) {
  return text.replace(/^/gm, "> ");
}

/** @param {Chat} chat */
function asJSON(chat) {
  const { system, ...settings } = chat.settings;
  const first = system?.trim() ? [{ role: "system", content: system }] : [];
  // As a request has them: what else there is of the answers stands beside them.
  const messages = [...first, ...shown(chat).map(asRequested)];
  const answers = shown(chat)
    .filter((message) => message.role === "assistant")
    .map(({ model, end }) => ({ model, finish_reason: end }));
  return `${JSON.stringify({ title: chat.title, settings, messages, answers }, null, 2)}\n`;
}

/** @type {Record<string, {type: string, text: (chat: Chat) => string}>} */
const FORMATS = {
  md: { type: "text/markdown", text: asMarkdown },
  json: { type: "application/json", text: asJSON },
};

/**
 * Let the browser save a chat.
 * @param {Chat} chat
 * @param {string} format "md" or "json"
 */
export function save(chat, format) {
  const { type, text } = FORMATS[format];
  const href = URL.createObjectURL(new Blob([text(chat)], { type }));
  const name = chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40);
  make("a", { href, download: `${name || "chat"}.${format}` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}
