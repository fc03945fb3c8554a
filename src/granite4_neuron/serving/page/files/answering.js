// An answer that is being generated. It goes on while another chat is shown.

import { asRequested, newMessage } from "./chat.js";
import { Away, Refused, answer } from "./server.js";
import { requestFields } from "./settings.js";

/** @typedef {import("./chat.js").Chat} Chat */
/** @typedef {import("./chat.js").Message} Message */

export class Answering {
  /**
   * @param {Chat} chat
   * @param {Message[]} history that is answered, or whose last message is continued
   * @param {boolean} isContinuing
   * @param {string} model
   */
  constructor(chat, history, isContinuing, model) {
    this.chat = chat;
    this._history = history;
    this._isContinuing = isContinuing;
    this._model = model;
    const last = /** @type {Message} */ (history.at(-1));
    /** the answer; it belongs to the chat only once it has a thought or a text */
    this.message = isContinuing ? last : newMessage("assistant", "", last.id);
    this.isWaiting = true;
    this.started = performance.now();
    this._controller = new AbortController();
  }

  stop() {
    this._controller.abort();
  }

  /**
   * Generate it.
   * @param {() => void} onText called after each part of the thought and of the text
   * @throws {Away | Refused} the server fails; what there is of the text stays
   */
  async run(onText) {
    const { message } = this;
    const before = message.content;
    delete message.end;
    message.model = this._model;
    try {
      let first = 0;
      for await (const { thought, text, tokens, end } of answer(this._body(), this._controller.signal)) {
        const now = performance.now();
        first ||= now;
        if (thought) message.thought = (message.thought ?? "") + thought;
        message.content += text;
        message.updated = Date.now();
        message.speed = speed(tokens, first - this.started, now - first);
        if (end) message.end = end;
        if (thought || text) this.isWaiting = false;
        onText();
      }
      // An answer without a text is one too.
      if (message.content === before) this.isWaiting = false;
    } catch (error) {
      message.end = /** @type {Error} */ (error).name === "AbortError" ? "stopped" : "broken";
      if (message.end === "broken") throw error;
    } finally {
      message.updated = Date.now();
    }
  }

  _body() {
    const { settings } = this.chat;
    const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
    return {
      model: this._model,
      messages: [...system, ...this._history.map(asRequested)],
      ...(this._isContinuing ? { continue_final_message: true } : {}),
      ...requestFields(settings),
    };
  }
}

/**
 * @param {number} tokens
 * @param {number} first milliseconds until the first part of the text
 * @param {number} others milliseconds since then
 */
function speed(tokens, first, others) {
  const rate = tokens > 1 && others > 0 ? `, ${((1000 * (tokens - 1)) / others).toFixed(1)} tokens/s` : "";
  return `${tokens} ${tokens === 1 ? "token" : "tokens"}${rate}, first after ${(first / 1000).toFixed(2)} s`;
}
