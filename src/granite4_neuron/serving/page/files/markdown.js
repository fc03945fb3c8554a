// Shows Markdown that the server has parsed, also while it grows.

import { button, make } from "./dom.js";
import { parseMarkdown } from "./server.js";

/** @typedef {string | [string, Record<string, any>, Array<any>]} Tree a text, or a tag, attributes and what is within */
/** @typedef {{line: number, node: Tree}} Block line: where it begins in the text that was parsed */

// Pauses between two requests, in milliseconds: so many times as long as the last one took, within these bounds.
const PAUSE_PER_REQUEST = 4;
const SHORTEST_PAUSE = 100;
const LONGEST_PAUSE = 1000;
const TAGS = new Set("a blockquote br code em h1 h2 h3 h4 h5 h6 hr li ol p s strong table tbody td th thead tr ul".split(" "));
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

let isPlain = false;

/**
 * Set whether all further texts are shown as they are.
 * @param {boolean} value
 */
export function setPlain(value) {
  isPlain = value;
}

export class MarkdownView {
  /**
   * @param {HTMLElement} element that shows it
   * @param {(text: string) => void} onBlock called with the text of each block that is complete, while the text grows
   */
  constructor(element, onBlock) {
    this._element = element;
    this._onBlock = onBlock;
    this._goal = { text: "", isFinal: false };
    /** @type {Promise<void> | null} */
    this._running = null;
    /** @type {(value?: any) => void} */
    this._endPause = () => {};
    /** @type {{source: string, element: HTMLElement}[]} the blocks that are shown */
    this._blocks = [];
    // What is before these will not change: only what is after them is parsed again.
    this._settledBlocks = 0;
    this._settledLength = 0;
    this._isGrowing = false;
    this._reported = 0; // blocks
    this._isPlain = false; // whether the text is shown as it is
  }

  /**
   * Show a text that may still grow. The pauses between two requests depend on how long they take.
   * @param {string} text
   */
  grow(text) {
    if (!this._isGrowing) this._reported = this._blocks.length;
    this._isGrowing = true;
    this._follow(text, false);
  }

  /**
   * Show a complete text.
   * @param {string} text
   */
  finish(text) {
    return this._follow(text, true);
  }

  /**
   * @param {string} text
   * @param {boolean} isFinal
   */
  _follow(text, isFinal) {
    this._goal = { text: text.replace(/\r\n?/g, "\n"), isFinal };
    if (isFinal) this._endPause();
    this._running ??= this._run().finally(() => (this._running = null));
    return this._running;
  }

  async _run() {
    for (let reached = null; reached !== this._goal; ) {
      reached = this._goal;
      const started = performance.now();
      await this._show(reached.text, reached.isFinal);
      if (reached.isFinal) continue;
      const pause = Math.max(SHORTEST_PAUSE, PAUSE_PER_REQUEST * (performance.now() - started));
      await new Promise((resolve) => {
        this._endPause = resolve;
        setTimeout(resolve, Math.min(pause, LONGEST_PAUSE));
      });
    }
  }

  /**
   * @param {string} text
   * @param {boolean} isFinal
   */
  async _show(text, isFinal) {
    if (isPlain) return this._showPlain(text);
    // At the end all of it, because a definition of a link may be below the link.
    const from = isFinal || this._isPlain ? 0 : this._settledLength;
    let blocks;
    try {
      blocks = await parseMarkdown(text.slice(from));
    } catch {
      // Whoever streams the answer says what is wrong.
      return this._showPlain(text);
    }
    const kept = from === 0 ? 0 : this._settledBlocks;
    this._replace(kept, blocks);
    if (!isFinal) this._settle(text, from, kept, blocks);
    else if (this._isGrowing) this._report(this._blocks.length);
    if (isFinal) this._isGrowing = false;
  }

  /** @param {string} text */
  _showPlain(text) {
    this._blocks = [];
    this._settledBlocks = this._settledLength = this._reported = 0;
    this._element.replaceChildren(make("p", { className: "as-typed", dir: "auto", textContent: text }));
    this._isPlain = true;
  }

  /**
   * Replace the blocks from one on. Those that are as before stay, with what is selected in them.
   * @param {number} first
   * @param {Block[]} blocks
   */
  _replace(first, blocks) {
    if (this._isPlain) this._element.replaceChildren();
    this._isPlain = false;
    blocks.forEach(({ node }, i) => {
      const source = JSON.stringify(node);
      const old = this._blocks[first + i];
      if (old?.source === source) return;
      const element = build(node);
      element.dir = "auto"; // of all within: a list's bullets are on the side where its text begins
      if (old) old.element.replaceWith(element);
      else this._element.append(element);
      this._blocks[first + i] = { source, element };
    });
    for (const { element } of this._blocks.splice(first + blocks.length)) element.remove();
  }

  /**
   * Note which blocks will not change any more: those before the last one whose first line is complete.
   * @param {string} text
   * @param {number} from where the blocks begin in it
   * @param {number} kept how many blocks are before them
   * @param {Block[]} blocks
   */
  _settle(text, from, kept, blocks) {
    const lines = lineStarts(text, from);
    let last = blocks.length - 1;
    while (last > 0 && blocks[last].line + 1 >= lines.length) last--;
    if (last <= 0) return;
    this._settledBlocks = kept + last;
    this._settledLength = lines[blocks[last].line];
    this._report(this._settledBlocks);
  }

  /**
   * Report the blocks before one that have not been reported.
   * @param {number} end
   */
  _report(end) {
    for (; this._reported < end; this._reported++) {
      this._onBlock(this._blocks[this._reported].element.textContent ?? "");
    }
  }
}

/**
 * @param {string} text
 * @param {number} from
 */
function lineStarts(text, from) {
  const starts = [from];
  for (let at = from; (at = text.indexOf("\n", at) + 1) > 0; ) starts.push(at);
  return starts;
}

/**
 * Make the elements of a block. They are made one by one, and only those that Markdown has.
 * @param {Tree} tree
 * @returns {any}
 */
function build(tree) {
  if (typeof tree === "string") return document.createTextNode(tree);
  const [tag, attributes, children] = tree;
  if (tag === "pre") return codeBlock(String(attributes.language), children[0] ?? "");
  if (!TAGS.has(tag)) return document.createTextNode(children.filter((child) => typeof child === "string").join(""));
  const element = make(tag, {}, ...children.map(build));
  if (tag === "a") setLink(element, attributes.href);
  if (tag === "ol" && attributes.start !== undefined) element.start = attributes.start;
  if (["left", "center", "right"].includes(attributes.align)) element.className = `align-${attributes.align}`;
  return tag === "table" ? make("div", { className: "scrolls" }, element) : element;
}

/**
 * @param {HTMLAnchorElement} element
 * @param {string} href
 */
function setLink(element, href) {
  if (!URL.canParse(href) || !SCHEMES.has(new URL(href).protocol)) return;
  Object.assign(element, { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" });
}

/**
 * @param {string} language
 * @param {string} code
 */
function codeBlock(language, code) {
  const pre = make("pre", { dir: "ltr" }, make("code", { textContent: code.replace(/\n$/, "") }));
  const bar = make("div", { className: "code-bar" }, make("span", { textContent: language }));
  bar.append(button("Copy", () => copy(pre.textContent, bar.lastChild), { "aria-label": "Copy the code" }));
  return make("div", { className: "code" }, bar, pre);
}

/**
 * Copy a text, and show on the button whether that worked.
 * @param {string} text
 * @param {any} pressed
 */
export async function copy(text, pressed) {
  const isCopied = await (navigator.clipboard?.writeText(text).then(
    () => true,
    () => copyBySelection(text),
  ) ?? copyBySelection(text));
  pressed.textContent = isCopied ? "Copied" : "Not copied";
  setTimeout(() => (pressed.textContent = "Copy"), 1500);
}

/**
 * Copy without the clipboard's own interface, which browsers have only on this machine and over TLS.
 * @param {string} text
 */
function copyBySelection(text) {
  const focused = /** @type {HTMLElement | null} */ (document.activeElement);
  const field = make("textarea", { value: text, className: "hidden" });
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}
