// A chat's settings: a form, its checks, and what becomes of them in a request.

import { byId, make } from "./dom.js";

/** @typedef {Record<string, string>} Settings what was typed, by name; "" or absent for the default */

/**
 * A setting. Its name is that of the request's field.
 * @typedef {{name: string, label: string, placeholder: string, wanted: string, isRight: (value: number) => boolean}} Field
 */

const isWhole = (/** @type {number} */ value) => Number.isSafeInteger(value);

/** @type {Field[]} */
const NUMBERS = [
  {
    name: "temperature",
    label: "Temperature",
    placeholder: "default",
    wanted: "a number from 0 up",
    isRight: (value) => value >= 0,
  },
  {
    name: "top_p",
    label: "Top p",
    placeholder: "default",
    wanted: "a number above 0 and up to 1",
    isRight: (value) => value > 0 && value <= 1,
  },
  {
    name: "top_k",
    label: "Top k",
    placeholder: "default",
    wanted: "a whole number from 0 up",
    isRight: (value) => isWhole(value) && value >= 0,
  },
  {
    name: "min_p",
    label: "Min p",
    placeholder: "default",
    wanted: "a number from 0 to 1",
    isRight: (value) => value >= 0 && value <= 1,
  },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    placeholder: "default",
    wanted: "a number above 0",
    isRight: (value) => value > 0,
  },
  {
    name: "max_tokens",
    label: "Most new tokens",
    placeholder: "what fits",
    wanted: "a whole number from 1 up",
    isRight: (value) => isWhole(value) && value >= 1,
  },
  {
    name: "seed",
    label: "Seed",
    placeholder: "random",
    wanted: "a whole number from 0 up",
    isRight: (value) => isWhole(value) && value >= 0,
  },
];

const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;

/**
 * What is wrong with a setting, as a sentence; "" if nothing is.
 * @param {Field} field
 * @param {string} typed
 */
function problem(field, typed) {
  const text = typed.trim();
  if (text === "" || (NUMBER.test(text) && field.isRight(Number(text)))) return "";
  return `${field.label} must be ${field.wanted}, and is “${text}”.`;
}

/**
 * The name of the first setting that is wrong, and what is wrong with it.
 * @param {Settings} settings
 * @returns {{name: string, problem: string} | undefined}
 */
export function firstProblem(settings) {
  return NUMBERS.map((field) => ({ name: field.name, problem: problem(field, settings[field.name] ?? "") })).find(
    (each) => each.problem,
  );
}

/**
 * The fields of a request that settings are.
 * @param {Settings} settings without a problem
 * @returns {Record<string, number>}
 */
export function requestFields(settings) {
  const given = NUMBERS.filter(({ name }) => settings[name]?.trim());
  return Object.fromEntries(given.map(({ name }) => [name, Number(settings[name])]));
}

/** The dialog. */
export class SettingsForm {
  /** @param {(settings: Settings) => void} onChange called with the settings at each change */
  constructor(onChange) {
    this._onChange = onChange;
    const system = make("textarea", { id: "system", rows: 3, dir: "auto", placeholder: "none" });
    byId("fields").append(make("label", { className: "wide" }, "System prompt", system));
    /** @type {Record<string, any>} */
    this._inputs = { system };
    for (const field of NUMBERS) byId("fields").append(this._numberField(field));
    byId("fields").addEventListener("input", () => this._changed());
    byId("open-settings").addEventListener("click", () => this.open());
    byId("close-settings").addEventListener("click", () => byId("settings").close());
    byId("settings").addEventListener("click", (/** @type {Event} */ event) => {
      if (event.target === byId("settings")) byId("settings").close(); // beside it
    });
    byId("reset-settings").addEventListener("click", () => {
      this.fill({});
      this._changed();
    });
  }

  /**
   * Show it.
   * @param {string} focused the id of the element to begin with
   */
  open(focused = "close-settings") {
    if (!byId("settings").open) byId("settings").showModal();
    byId(focused).focus();
  }

  /**
   * Put settings into the fields.
   * @param {Settings} settings
   */
  fill(settings) {
    for (const [name, input] of Object.entries(this._inputs)) input.value = settings[name] ?? "";
    this._check();
  }

  /** @param {Field} field */
  _numberField(field) {
    const { name, label, placeholder } = field;
    // Not of the type "number": that one hides what was typed if it is no number.
    const attributes = { inputmode: "decimal", "aria-describedby": `${name}-problem` };
    const input = make("input", { id: name, placeholder, autocomplete: "off", ...attributes });
    this._inputs[name] = input;
    return make("label", {}, label, input, make("span", { id: `${name}-problem`, className: "wrong" }));
  }

  _changed() {
    this._check();
    this._onChange(Object.fromEntries(Object.entries(this._inputs).map(([name, input]) => [name, input.value])));
  }

  _check() {
    for (const field of NUMBERS) {
      const wrong = problem(field, this._inputs[field.name].value);
      byId(`${field.name}-problem`).textContent = wrong;
      this._inputs[field.name].setAttribute("aria-invalid", String(wrong !== ""));
    }
  }
}
