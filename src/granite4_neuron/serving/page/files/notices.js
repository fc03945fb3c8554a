// What the page has to say: notices that stay until they are settled, and what is said once.

import { button, byId, make } from "./dom.js";

/** @type {Map<string, HTMLElement>} */
const notices = new Map();

/**
 * Show a notice above the field for messages, in place of an earlier one with its name.
 * @param {string} name
 * @param {string} text
 * @param {{label: string, onClick: () => void} | null} action
 */
export function notify(name, text, action = null) {
  settle(name);
  const notice = make("p", { className: "notice", role: "alert" }, make("span", { textContent: text }));
  if (action) notice.append(button(action.label, action.onClick));
  notice.append(button("✕", () => settle(name), { className: "plain", "aria-label": "Hide this notice" }));
  notices.set(name, notice);
  byId("notices").append(notice);
}

/**
 * Take a notice away.
 * @param {string} name
 */
export function settle(name) {
  notices.get(name)?.remove();
  notices.delete(name);
}

/**
 * Say something below the field for messages.
 * @param {string} text
 */
export function say(text) {
  byId("status").textContent = text;
}

/**
 * Say something to screen readers only.
 * @param {string} text
 */
export function speak(text) {
  const spoken = byId("spoken");
  spoken.append(make("p", { textContent: text }));
  while (spoken.childElementCount > 20) spoken.firstElementChild.remove();
}
