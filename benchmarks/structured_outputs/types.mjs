// Prints the JSON schemas of zod's types: {name: schema, or null where zod writes none}.
import { createRequire } from "node:module";

const { z } = createRequire(process.cwd() + "/")("zod");
const Tree = z.object({ name: z.string(), get children() { return z.array(Tree); } });
const circle = z.object({ kind: z.literal("circle"), radius: z.number() });
const square = z.object({ kind: z.literal("square"), side: z.number() });
const types = {
  "string": () => z.string(),
  "string().min().max()": () => z.string().min(1).max(9),
  "string().regex()": () => z.string().regex(/^[a-z]+$/),
  "string().regex() with look-around": () => z.string().regex(/^(?!0)\d+$/),
  "string().startsWith()": () => z.string().startsWith("a"),
  "string().endsWith()": () => z.string().endsWith("a"),
  "string().includes()": () => z.string().includes("a"),
  "string().lowercase()": () => z.string().lowercase(),
  "string().uppercase()": () => z.string().uppercase(),
  "string().trim()": () => z.string().trim(),
  ...Object.fromEntries(
    ["email", "uuid", "uuidv4", "uuidv6", "uuidv7", "guid", "url", "httpUrl", "hostname", "emoji", "base64", "base64url",
      "hex", "jwt", "nanoid", "cuid", "cuid2", "ulid", "xid", "ksuid", "ipv4", "ipv6", "mac", "cidrv4", "cidrv6", "e164",
      "number", "int", "int32", "uint32", "int64", "uint64", "float32", "float64", "bigint", "boolean", "date", "symbol",
      "undefined", "null", "void", "any", "unknown", "nan", "file", "json", "stringbool", "custom",
    ].map((name) => [name, () => z[name]()])),
  "hash()": () => z.hash("sha256"),
  ...Object.fromEntries(["date", "time", "datetime", "duration"].map((name) => [`iso.${name}`, () => z.iso[name]()])),
  "iso.datetime({offset})": () => z.iso.datetime({ offset: true }),
  "iso.datetime({local})": () => z.iso.datetime({ local: true }),
  "number().min().max()": () => z.number().min(1).max(9),
  "number().gt().lt()": () => z.number().gt(1).lt(9),
  "number().multipleOf()": () => z.number().multipleOf(0.5),
  "literal": () => z.literal(["a", 1, true, null]),
  "enum": () => z.enum(["a", "b"]),
  "templateLiteral": () => z.templateLiteral(["a-", z.int(), "-", z.enum(["x", "y"])]),
  "object": () => circle,
  "strictObject": () => z.strictObject({ a: z.string() }),
  "looseObject": () => z.looseObject({ a: z.string() }),
  "object().catchall()": () => z.object({ a: z.string() }).catchall(z.number()),
  "object().partial()": () => circle.partial(),
  "recursive object": () => Tree,
  "lazy": () => z.lazy(() => Tree),
  "array": () => z.array(z.string()),
  "array of never": () => z.array(z.never()),
  "array().min().max()": () => z.array(z.string()).min(1).max(3),
  "tuple": () => z.tuple([z.string(), z.number()]),
  "tuple with a rest": () => z.tuple([z.string()], z.number()),
  "union": () => z.union([z.string(), z.number()]),
  "discriminatedUnion": () => z.discriminatedUnion("kind", [circle, square]),
  "xor": () => z.xor([z.string(), z.number()]),
  "xor of types that overlap": () => z.xor([z.int(), z.number()]),
  "intersection": () => z.intersection(circle, z.object({ name: z.string() })),
  "record": () => z.record(z.string(), z.number()),
  "record of an enum": () => z.record(z.enum(["a", "b"]), z.number()),
  "partialRecord": () => z.partialRecord(z.enum(["a", "b"]), z.number()),
  "looseRecord": () => z.looseRecord(z.string().regex(/^a/), z.number()),
  "map": () => z.map(z.string(), z.number()),
  "set": () => z.set(z.string()),
  "optional": () => z.object({ a: z.string().optional() }),
  "exactOptional": () => z.object({ a: z.string().exactOptional() }),
  "never().optional()": () => z.object({ a: z.never().optional() }),
  "nullable": () => z.string().nullable(),
  "nullish": () => z.object({ a: z.string().nullish() }),
  "nonoptional": () => z.object({ a: z.string().optional().nonoptional() }),
  "default": () => z.object({ a: z.string().default("b") }),
  "prefault": () => z.object({ a: z.string().prefault("b") }),
  "catch": () => z.string().catch("b"),
  "readonly": () => z.object({ a: z.string() }).readonly(),
  "brand": () => z.string().brand(),
  "refine": () => z.string().refine((text) => text.length),
  "keyof": () => z.keyof(circle),
  "pipe": () => z.string().pipe(z.string().min(1)),
  "transform": () => z.string().transform((text) => text.length),
  "codec": () => z.codec(z.iso.datetime(), z.date(), { decode: (text) => new Date(text), encode: (date) => date.toISOString() }),
  "promise": () => z.promise(z.string()),
  "function": () => z.function(),
  "instanceof": () => z.instanceof(Map),
};

function schema(make) {
  try {
    return z.toJSONSchema(make());
  } catch {
    return null; // zod says that it cannot be represented
  }
}

console.log(JSON.stringify(Object.fromEntries(Object.entries(types).map(([name, make]) => [name, schema(make)]))));
