// The chats that the browser keeps, in IndexedDB. Several tabs may have the same chat open.

import { merge } from "./chat.js";

/** @typedef {import("./chat.js").Chat} Chat */
/** @typedef {{id: string, title: string, updated: number}} Summary */

const STORE = "chats";

export class Storage {
  /**
   * Open it.
   * @param {(id: string) => void} onChange called where another tab has changed or deleted a chat
   * @returns {Promise<Storage>}
   */
  static open(onChange) {
    return new Promise((resolve, reject) => {
      const opening = indexedDB.open("granite4-neuron", 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
      opening.onsuccess = () => resolve(new Storage(opening.result, onChange));
      opening.onerror = () => reject(opening.error);
    });
  }

  /**
   * @param {IDBDatabase} database
   * @param {(id: string) => void} onChange
   */
  constructor(database, onChange) {
    this._database = database;
    this._tabs = new BroadcastChannel("granite4-neuron");
    this._tabs.onmessage = (event) => onChange(event.data);
    /** @type {Set<string>} chats that are known to be there: one that is gone was deleted in another tab */
    this._kept = new Set();
  }

  /**
   * All chats, the newest first.
   * @returns {Promise<Summary[]>}
   */
  async list() {
    /** @type {Summary[]} */
    const summaries = [];
    await this._transaction("readonly", (store) => {
      store.openCursor().onsuccess = (event) => {
        const cursor = /** @type {any} */ (event.target).result;
        if (!cursor) return;
        const { id, title, updated } = cursor.value;
        summaries.push({ id, title, updated });
        cursor.continue();
      };
    });
    return summaries.sort((one, other) => other.updated - one.updated);
  }

  /**
   * @param {string} id
   * @returns {Promise<Chat | undefined>} undefined if it is not there
   */
  async load(id) {
    /** @type {Chat | undefined} */
    let chat;
    await this._transaction("readonly", (store) => {
      store.get(id).onsuccess = (event) => (chat = /** @type {any} */ (event.target).result);
    });
    if (chat) this._kept.add(id);
    return chat;
  }

  /**
   * Write a chat, with what other tabs have added to it.
   * @param {Chat} chat
   */
  async save(chat) {
    await this._change(chat.id, (stored) => {
      if (!stored) return this._kept.has(chat.id) ? undefined : chat;
      const merged = { ...chat, title: stored.title, messages: { ...stored.messages } };
      merge(merged, chat);
      return merged;
    });
    this._kept.add(chat.id);
  }

  /**
   * @param {string} id
   * @param {string} title
   */
  rename(id, title) {
    return this._change(id, (stored) => stored && { ...stored, title });
  }

  /** @param {string} id */
  async remove(id) {
    await this._transaction("readwrite", (store) => store.delete(id));
    this._kept.delete(id);
    this._tabs.postMessage(id);
  }

  /**
   * Read a chat and write what it becomes, with nobody in between.
   * @param {string} id
   * @param {(stored: Chat | undefined) => Chat | undefined} change returns undefined to write nothing
   */
  async _change(id, change) {
    await this._transaction("readwrite", (store) => {
      store.get(id).onsuccess = (event) => {
        const changed = change(/** @type {any} */ (event.target).result);
        if (changed) store.put(changed);
      };
    });
    this._tabs.postMessage(id);
  }

  /**
   * @param {IDBTransactionMode} mode
   * @param {(store: IDBObjectStore) => void} work
   * @returns {Promise<void>}
   */
  _transaction(mode, work) {
    return new Promise((resolve, reject) => {
      const transaction = this._database.transaction(STORE, mode);
      transaction.oncomplete = () => resolve();
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
      work(transaction.objectStore(STORE));
    });
  }
}
