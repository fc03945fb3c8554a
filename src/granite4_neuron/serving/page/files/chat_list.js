// The list of chats at the side.

import { button, byId, make } from "./dom.js";

/** @typedef {import("./storage.js").Summary} Summary */
/** @typedef {{open: (id: string) => void, rename: (id: string, title: string) => void, remove: (id: string) => void}} Actions */

export class ChatList {
  /** @param {Actions} actions */
  constructor(actions) {
    this._actions = actions;
    /** @type {Summary[]} */
    this._summaries = [];
    this._current = "";
    this._drawn = ""; // what the list shows
    /** @type {(id: string) => boolean} */
    this._isAnswering = () => false;
    byId("filter").addEventListener("input", () => this._draw());
  }

  /**
   * Show chats.
   * @param {Summary[]} summaries
   * @param {string} current the id of the chat that is shown
   * @param {(id: string) => boolean} isAnswering
   */
  show(summaries, current, isAnswering) {
    this._summaries = summaries;
    this._current = current;
    this._isAnswering = isAnswering;
    // Nothing is replaced without need: somebody may be about to click on it, or typing a title.
    const drawn = JSON.stringify([current, summaries.map(({ id, title }) => [id, title, isAnswering(id)])]);
    if (drawn === this._drawn || byId("chats").querySelector("input")) return;
    this._drawn = drawn;
    this._draw();
  }

  _draw() {
    const wanted = byId("filter").value.trim().toLowerCase();
    const found = this._summaries.filter((each) => each.title.toLowerCase().includes(wanted));
    const list = byId("chats");
    // The focus stays on the same button of the same chat.
    const focused = list.contains(document.activeElement) ? document.activeElement : null;
    const [id, label] = [focused?.closest("li")?.dataset.id, focused?.className];
    list.replaceChildren(...found.map((each) => this._item(each)));
    if (id) list.querySelector(`[data-id="${id}"] .${label}`)?.focus();
    byId("filter").hidden = this._summaries.length < 8;
    byId("no-chats").hidden = this._summaries.length > 0;
  }

  /** @param {Summary} summary */
  _item({ id, title }) {
    const item = make("li", { "data-id": id });
    const open = button(title, () => this._actions.open(id), { className: "open", title, dir: "auto" });
    if (id === this._current) open.setAttribute("aria-current", "true");
    if (this._isAnswering(id)) open.prepend(make("span", { className: "dot", role: "img", "aria-label": "is answered" }));
    const rename = button("Rename", () => this._rename(item, id, title), { className: "rename" });
    const remove = button("Delete", () => this._remove(item, id), { className: "remove" });
    rename.setAttribute("aria-label", `Rename ${title}`);
    remove.setAttribute("aria-label", `Delete ${title}`);
    item.append(open, make("span", { className: "actions" }, rename, remove));
    return item;
  }

  /**
   * Delete a chat; the focus goes to the next one.
   * @param {HTMLElement} item
   * @param {string} id
   */
  _remove(item, id) {
    const next = item.nextElementSibling ?? item.previousElementSibling;
    /** @type {HTMLElement} */ (next?.querySelector(".remove") ?? byId("new")).focus();
    this._actions.remove(id);
  }

  /**
   * Let the person type a title: Enter keeps it, Escape does not.
   * @param {HTMLElement} item
   * @param {string} id
   * @param {string} title
   */
  _rename(item, id, title) {
    const field = make("input", { value: title, dir: "auto", "aria-label": "Title" });
    const end = (/** @type {boolean} */ isKept, /** @type {boolean} */ keepsFocus) => {
      field.onblur = null;
      const typed = field.value.trim();
      field.remove();
      this._draw();
      if (keepsFocus) byId("chats").querySelector(`[data-id="${id}"] .open`)?.focus();
      if (isKept && typed && typed !== title) this._actions.rename(id, typed);
    };
    field.onblur = () => end(true, false);
    field.onkeydown = (/** @type {KeyboardEvent} */ event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.stopPropagation();
      end(event.key === "Enter", true);
    };
    item.replaceChildren(field);
    field.select();
  }
}
