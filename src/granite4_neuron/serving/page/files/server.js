// Requests to the server that the page is from.

/** The server does not answer, or the connection broke. */
export class Away extends Error {}

/** The server refuses the request; the message is its own. */
export class Refused extends Error {
  /**
   * @param {number} status
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const GATEWAY_STATUSES = [502, 503, 504]; // a proxy's, and this server's when it is ending

let key = "";

/**
 * Set the API key of all further requests; "" for none.
 * @param {string} value
 */
export function setKey(value) {
  // A header is bytes.
  key = String.fromCharCode(...new TextEncoder().encode(value.trim()));
}

/**
 * The models that requests may name; the first one is the default.
 * @returns {Promise<string[]>}
 */
export async function models() {
  const list = await (await request("v1/models")).json();
  return list.data.map((/** @type {{id: string}} */ model) => model.id);
}

/** @returns {Promise<boolean>} whether the server answers */
export async function isUp() {
  return fetch("health", { cache: "no-store" }).then(
    (response) => response.ok,
    () => false,
  );
}

/**
 * Parse Markdown.
 * @param {string} text
 * @returns {Promise<import("./markdown.js").Block[]>}
 */
export async function parseMarkdown(text) {
  return (await (await post("page/markdown", { text })).json()).blocks;
}

/**
 * Stream the answer to a chat.
 * @param {object} body of the request, without what asks for a stream
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<{thought: string, text: string, tokens: number, end: string | null}>}
 * @throws {Away | Refused} also in the middle of it
 */
export async function* answer(body, signal) {
  const options = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const response = await post("v1/chat/completions", { ...body, ...options }, signal);
  let isComplete = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Refused(response.status, event.error.message);
    const [choice] = event.choices;
    if (!choice) continue;
    isComplete ||= choice.finish_reason !== null;
    const { reasoning_content: thought = "", content: text } = choice.delta;
    yield { thought, text: text ?? "", tokens: event.usage.completion_tokens, end: choice.finish_reason };
  }
  if (!isComplete) throw new Away("The connection broke.");
}

/**
 * The data of server-sent events.
 * @param {Response} response
 */
async function* events(response) {
  const reader = /** @type {ReadableStream} */ (response.body).pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read().catch(explain);
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = /** @type {string} */ (parts.pop());
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice("data: ".length);
  }
}

/**
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} [signal]
 */
function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return request(path, { method: "POST", body: JSON.stringify(body), headers, signal });
}

/**
 * @param {string} path
 * @param {RequestInit} options
 * @returns {Promise<Response>}
 */
async function request(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store" }).catch(explain);
  if (response.ok) return response;
  if (GATEWAY_STATUSES.includes(response.status)) throw new Away(`The server is away (status ${response.status}).`);
  const answer = await response.json().catch(() => ({}));
  throw new Refused(response.status, answer.error?.message ?? `The server answered with status ${response.status}.`);
}

/**
 * Browsers report a server that does not answer as a TypeError, each in its own words.
 * @param {Error} error
 * @returns {never}
 */
function explain(error) {
  throw error.name === "AbortError" ? error : new Away("The server does not answer.");
}
