// Short texts by name that the browser keeps. Where it keeps nothing, they are there until the page is closed.

class KeptTexts {
  /** @param {() => Storage} place which throws where the browser keeps nothing */
  constructor(place) {
    this._place = place;
    /** @type {Map<string, string>} */
    this._texts = new Map();
  }

  /**
   * @param {string} name
   * @returns {string} "" if there is none
   */
  get(name) {
    try {
      return this._place().getItem(name) ?? "";
    } catch {
      return this._texts.get(name) ?? "";
    }
  }

  /**
   * @param {string} name
   * @param {string} text "" for none
   */
  set(name, text) {
    this._texts.set(name, text);
    try {
      if (text) this._place().setItem(name, text);
      else this._place().removeItem(name);
    } catch {
      // It is kept in `_texts`.
    }
  }
}

/** Kept for all tabs, until somebody clears the browser's data. */
export const browserKeeps = new KeptTexts(() => localStorage);

/** Kept until the tab is closed. */
export const tabKeeps = new KeptTexts(() => sessionStorage);
