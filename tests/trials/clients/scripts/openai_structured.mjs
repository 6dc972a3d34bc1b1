// The openai package for node asks for a JSON schema and for tool calls: what to ask on stdin, what came on stdout.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const OpenAI = createRequire(`${process.cwd()}/`)("openai").OpenAI;
const given = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL: given.base_url, apiKey: "none", maxRetries: 0 });

async function choice(asked, stream) {
  const options = { messages: given.messages, ...given.options, ...asked };
  const completion = stream
    ? await client.chat.completions.stream(options).finalChatCompletion()
    : await client.chat.completions.create(options);
  return completion.choices[0];
}

const format = {
  type: "json_schema",
  json_schema: { name: "person", schema: given.schema, strict: true },
};
const tools = [{ type: "function", function: given.tool }];
const got = {};
for (const stream of [false, true]) {
  const suffix = stream ? ", stream" : "";
  got[`schema${suffix}`] = JSON.parse((await choice({ response_format: format }, stream)).message.content);
  const called = (await choice({ tools, tool_choice: "required", parallel_tool_calls: false }, stream)).message.tool_calls[0].function;
  got[`tool${suffix}`] = { name: called.name, arguments: JSON.parse(called.arguments) };
}
console.log(JSON.stringify(got));
