// Drives the server with the AI SDK. Arguments: the address of the API, and the model.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;
const providers = {
  "@ai-sdk/openai": createOpenAI({ baseURL: url, apiKey: "none" }),
  "@ai-sdk/anthropic": createAnthropic({ baseURL: url, apiKey: "none" }),
};
console.log(`ai ${version("ai")}`);

for (const [name, provider] of Object.entries(providers)) {
  const say = (what) => console.log(`${name} ${version(name)}: ${what}`);
  const common = { model: provider(model), maxRetries: 0, temperature: 0 };
  const question = { ...common, system: "be brief", prompt: "What is the assert statement?", maxOutputTokens: 20 };

  const whole = await generateText(question);
  const stream = streamText({ ...question, onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, whole.text);
  assert.equal(await stream.finishReason, "length");
  assert.equal((await stream.usage).outputTokens, 20);
  say(`a text, whole and streamed: ${JSON.stringify(text)}`);

  const asked = [];
  const weather = tool({
    description: "Look out of the window.",
    inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
    execute: async ({ city }) => { asked.push(city); return "sunny"; },
  });
  const looping = {
    ...common,
    prompt: "Rome?",
    tools: { weather },
    maxOutputTokens: 200,
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "auto" }),
  };
  const looped = await generateText(looping);
  assert.deepEqual([asked.length, looped.steps.length, looped.steps[0].finishReason], [1, 2, "tool-calls"]);
  const streamed = streamText({ ...looping, onError: ({ error }) => { throw error; } });
  assert.equal(await streamed.text, looped.text);
  assert.equal(asked.length, 2);
  say(`a call of weather(${asked[0]}), whole and streamed, and ${looped.text.length} characters that follow its result`);

  const schema = z.object({ city: z.enum(["Rome", "Oslo"]), isSunny: z.boolean() });
  const { output } = await generateText({ ...common, prompt: "Rome?", maxOutputTokens: 200, output: Output.object({ schema }) });
  say(`an object: ${JSON.stringify(output)}`);

  const messages = [{ role: "user", content: "Hello." }, ...whole.response.messages, { role: "user", content: "And?" }];
  const providerOptions = { openai: { store: false } };
  const next = await generateText({ ...common, messages, providerOptions, maxOutputTokens: 5 });
  say(`a second turn: ${JSON.stringify(next.text)}`);
}
