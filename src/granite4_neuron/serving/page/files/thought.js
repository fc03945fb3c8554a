// Shows what a model thought before its answer.

import { make } from "./dom.js";
import { speak } from "./notices.js";

export class ThoughtView {
  constructor() {
    this._text = document.createTextNode("");
    this._summary = make("summary");
    this._isChosen = false; // whether the person has opened or closed it
    this.element = make("details", { className: "thought", hidden: true }, this._summary);
    this.element.append(make("p", { className: "as-typed", dir: "auto" }, this._text));
    this._summary.addEventListener("click", () => (this._isChosen = true));
  }

  /**
   * Show a thought. It is open while it grows, and closed when it has ended, unless the person wants it otherwise.
   * @param {string} text "" for none
   * @param {boolean} isGrowing
   */
  show(text, isGrowing) {
    if (isGrowing && text && this.element.hidden) speak("Thinking");
    this.element.hidden = !text;
    this._summary.textContent = isGrowing ? "Thinking…" : "Thought";
    if (!this._isChosen) this.element.open = isGrowing;
    // What is there stays, and so does what is selected in it.
    if (text.startsWith(this._text.data)) this._text.appendData(text.slice(this._text.length));
    else this._text.data = text;
  }
}
