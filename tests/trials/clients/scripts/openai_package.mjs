// The openai package for node, from the folder that it is started in: asks on stdin, answers on stdout, both as JSON.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const OpenAI = createRequire(`${process.cwd()}/`)("openai").OpenAI;
const given = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL: given.base_url, apiKey: "none", maxRetries: 0 });

async function response(ask) {
  const options = { model: given.model, input: ask.input, max_output_tokens: ask.max_tokens, temperature: 0 };
  let got = await client.responses.create({ ...options, stream: ask.stream });
  let text = got.output_text;
  if (ask.stream) {
    const events = [];
    for await (const event of got) events.push(event);
    got = events.at(-1).response;
    text = events.map((event) => (event.type === "response.output_text.delta" ? event.delta : "")).join("");
  }
  return { text, prompt_tokens: got.usage.input_tokens, completion_tokens: got.usage.output_tokens };
}

async function answer(ask) {
  if (ask.input) return response(ask);
  const options = { model: given.model, max_tokens: ask.max_tokens, temperature: 0 };
  if (ask.stream) Object.assign(options, { stream: true, stream_options: { include_usage: true } });
  const got = ask.messages
    ? await client.chat.completions.create({ messages: ask.messages, ...options })
    : await client.completions.create({ prompt: ask.prompt, ...options });
  const chunks = [];
  if (ask.stream) for await (const chunk of got) chunks.push(chunk);
  else chunks.push(got);
  const texts = chunks.flatMap((chunk) => chunk.choices.map((choice) => (choice.delta ?? choice.message ?? choice)));
  const usage = chunks.at(-1).usage;
  return {
    text: texts.map((part) => part.content ?? part.text ?? "").join(""),
    prompt_tokens: usage.prompt_tokens,
    completion_tokens: usage.completion_tokens,
  };
}

const answers = {};
for (const ask of given.asks) answers[ask.name] = await answer(ask);
try {
  await answer(given.too_long);
} catch (error) {
  answers["too long"] = { error: error.code };
}
console.log(JSON.stringify(answers));
