// Small helpers to find and make elements.

/**
 * The element with an id, which the page has.
 * @param {string} id
 * @returns {any}
 */
export function byId(id) {
  return document.getElementById(id);
}

/**
 * Make an element. Text is text: nothing of the page is made from HTML.
 * @param {string} tag
 * @param {Record<string, any>} properties of the element, or attributes where their names have a hyphen
 * @param {...(Node|string)} children
 * @returns {any}
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else /** @type {any} */ (element)[name] = value;
  }
  element.append(...children);
  return element;
}

/**
 * Make a button.
 * @param {string} text
 * @param {() => void} onClick
 * @param {Record<string, any>} properties
 */
export function button(text, onClick, properties = {}) {
  const made = make("button", { type: "button", textContent: text, ...properties });
  made.addEventListener("click", onClick);
  return made;
}

/**
 * Make a text field as high as its text; the style sheet has a limit.
 * @param {HTMLTextAreaElement} field
 */
export function fitHeight(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

/**
 * Whether a key sends a message: Enter, but not where it chooses a word of an input method. On a telephone, whose keyboards
 * have no Shift+Enter, it begins a line.
 * @param {KeyboardEvent} event
 */
export function isSending(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
}
