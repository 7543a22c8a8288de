// Look at runs and answer them from mongosh alone:
//
//     mongosh "mongodb://…/mongo_durable" --file durable.js --shell
//     > durable.help()
//
// What is written here is what the library writes, document for document and under the same guards; in the library, each part says which one it is:
//
//     canonical, digest    mongo_durable/protocol/canonical.py
//     encode               mongo_durable/protocol/values.py
//     resolve              mongo_durable/engine/resolving.py, mongo_durable/store/frontiers.py
//     cancel               mongo_durable/store/runs.py
//
// What cannot be done exactly here is refused, and the message says what to run instead. The tests compare both, value by value and field by field.
//
// Everything is written for mongosh, which waits for the database by itself: no `await`, and no call to the database in a callback of map or sort.

globalThis.durable = (() => {
  "use strict";

  const SCHEMA_VERSION = 1;
  const CHANNEL = "mongosh";
  const ENDED = ["completed", "failed", "diverged", "cancelled"];
  const DUPLICATE_KEY = 11000;
  const CANCEL_TRIES = 50;

  let chosenDatabase = null;

  // --- errors: named and coded like the library's ---------------------------------------------------------------------------------------------------

  function failure(name, message) {
    const code = name.replace(/[A-Z]/g, (letter) => "_" + letter.toLowerCase()).slice(1);
    const error = new Error(`${message} [${code}]`);
    error.name = name;
    error.code = code;
    return error;
  }

  // The head is not in the expected state: abort, then find out why by reading.
  const lost = () => failure("Lost", "the run has moved");
  const isLost = (error) => error.name === "Lost" || error.code === DUPLICATE_KEY;

  // --- values ---------------------------------------------------------------------------------------------------------------------------------------

  const ENVELOPE = "__type__";
  const NATURAL_LEVELS = 60;
  const DECIMAL_BITS = 2000;
  const I32 = 2n ** 31n;
  const I64 = 2n ** 63n;
  const PLAIN_KEY = /^(?!\$)(?!__type__$)[^.\0\ud800-\udfff]+$/u;
  const LONE_SURROGATE = /[\ud800-\udfff]/u;

  function notJsonSafe(path, why) {
    return failure("NotJsonSafe", `${path} cannot be stored exactly from mongosh: ${why}`);
  }

  function isPlainObject(value) {
    if (typeof value !== "object" || value === null || Array.isArray(value) || value._bsontype !== undefined) return false;
    const prototype = Object.getPrototypeOf(value);
    return prototype === null || Object.getPrototypeOf(prototype) === null; // also an object of another context
  }

  // An integer as the library stores it: 32 bits where they do, else 64, else in an envelope.
  function encodeInteger(value) {
    if (-I32 <= value && value < I32) return Number(value);
    if (-I64 <= value && value < I64) return Long.fromString(value.toString());
    const magnitude = value < 0n ? -value : value;
    const text = magnitude.toString(2).length <= DECIMAL_BITS ? magnitude.toString() : "0x" + magnitude.toString(16);
    return { [ENVELOPE]: "int", value: (value < 0n ? "-" : "") + text };
  }

  function encodeNumber(value, path) {
    if (!Number.isInteger(value) || Object.is(value, -0)) return Double(value);
    if (!Number.isSafeInteger(value)) {
      throw notJsonSafe(path, `JavaScript has rounded the integer ${value}; write Long("…"), 123n, or Double(…) for a floating-point number`);
    }
    return encodeInteger(BigInt(value));
  }

  // A value as a plain tree that BSON holds exactly. A whole JavaScript number is an integer, so 1.0 is 1; Double(1) is the floating-point number.
  function encode(value, path = "$", depth = 1) {
    if (value === null || typeof value === "boolean") return value;
    if (typeof value === "string") {
      if (LONE_SURROGATE.test(value)) throw notJsonSafe(path, "the text has half of a character (a lone surrogate)");
      return value;
    }
    if (typeof value === "number") return encodeNumber(value, path);
    if (typeof value === "bigint") return encodeInteger(value);
    if (Array.isArray(value) || isPlainObject(value)) {
      if (depth > NATURAL_LEVELS) throw notJsonSafe(path, `it is nested more than ${NATURAL_LEVELS} levels deep; use mongo-durable resolve`);
      return Array.isArray(value) ? encodeArray(value, path, depth) : encodeObject(value, path, depth);
    }
    if (value && Object.hasOwn(value, "_bsontype")) throw notJsonSafe(path, "it has the key _bsontype; use mongo-durable resolve");
    switch (value && value._bsontype) {
      case "Int32":
        return encodeInteger(BigInt(value.valueOf()));
      case "Long":
        return encodeInteger(BigInt(value.toString()));
      case "Double":
        return Double(value.valueOf());
      case "Binary":
        if (value.sub_type === 0) return value;
    }
    const what = value === undefined ? "undefined" : value._bsontype || Object.prototype.toString.call(value).slice(8, -1);
    throw notJsonSafe(path, `it is ${what}; write it as text, number, true, false, null, list or object`);
  }

  function encodeArray(value, path, depth) {
    const items = [];
    for (let index = 0; index < value.length; index++) items.push(encode(value[index], `${path}[${index}]`, depth + 1));
    return items;
  }

  function encodeObject(value, path, depth) {
    const keys = Object.keys(value);
    const special = keys.find((key) => ["__proto__", "toBSON"].includes(key));
    if (special !== undefined) throw notJsonSafe(path, `it has the key ${special}; use mongo-durable resolve`);
    if (keys.every((key) => PLAIN_KEY.test(key))) {
      const fields = {};
      for (const key of keys) fields[key] = encode(value[key], `${path}.${key}`, depth + 1);
      return fields;
    }
    const pairs = [];
    for (const key of keys) pairs.push([encode(key, path), encode(value[key], `${path}[${JSON.stringify(key)}]`, depth + 3)]);
    return { [ENVELOPE]: "dict", value: pairs };
  }

  const byCodePoint = (one, other) => Buffer.compare(Buffer.from(one), Buffer.from(other)); // UTF-8 sorts like code points; JavaScript's own order does not

  // A floating-point number as Python writes it: the shortest digits, laid out differently.
  function pythonFloat(value) {
    if (Number.isNaN(value)) return "NaN";
    if (!Number.isFinite(value)) return value > 0 ? "Infinity" : "-Infinity";
    const sign = value < 0 || Object.is(value, -0) ? "-" : "";
    const [mantissa, exponentText] = Math.abs(value).toExponential().split("e");
    const digits = mantissa.replace(".", "");
    const exponent = Number(exponentText);
    if (exponent < -4 || exponent >= 16) {
      const fraction = digits.length > 1 ? "." + digits.slice(1) : "";
      return `${sign}${digits[0]}${fraction}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
    }
    if (exponent < 0) return `${sign}0.${"0".repeat(-exponent - 1)}${digits}`;
    const whole = digits.slice(0, exponent + 1).padEnd(exponent + 1, "0");
    return `${sign}${whole}.${digits.slice(exponent + 1) || "0"}`;
  }

  // The canonical JSON of what encode returned: the same bytes as the library's, because digests of them are compared.
  function canonical(tree) {
    if (tree === null || typeof tree === "boolean" || typeof tree === "number") return String(tree);
    if (typeof tree === "string") return JSON.stringify(tree);
    if (Array.isArray(tree)) return `[${tree.map(canonical).join(",")}]`;
    switch (tree._bsontype) {
      case "Long":
        return tree.toString();
      case "Double":
        return pythonFloat(tree.valueOf());
      case "Binary":
        return `{"${ENVELOPE}":"bytes","value":"${Buffer.from(tree.buffer.subarray(0, tree.position)).toString("base64")}"}`;
    }
    if (tree[ENVELOPE] === "dict") {
      const pairs = tree.value.map(canonical).sort(byCodePoint); // the order of insertion is no part of what a dict means
      return `{"${ENVELOPE}":"dict","value":[${pairs.join(",")}]}`;
    }
    const keys = Object.keys(tree).sort(byCodePoint);
    return `{${keys.map((key) => `${JSON.stringify(key)}:${canonical(tree[key])}`).join(",")}}`;
  }

  function digest(tree) {
    return require("crypto").createHash("sha256").update(canonical(tree), "utf8").digest("hex").slice(0, 32);
  }

  // --- JSON Schema ----------------------------------------------------------------------------------------------------------------------------------
  //
  // The part of draft 2020-12 that questions are made of. A keyword that is not here is never passed over: the answer is refused, unchecked.

  const ANNOTATIONS = ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$defs", "definitions"];
  ANNOTATIONS.push("format", "contentEncoding", "contentMediaType", "discriminator"); // checked by nobody, in the library neither
  const DRAFT = /^https:\/\/json-schema\.org\/draft\/2020-12\/schema#?$/;
  const DEEPEST = 200;
  const BYTES = Symbol("bytes");

  function unchecked(what) {
    return failure("InvalidAnswer", `the answer cannot be checked in mongosh: its schema has ${what}; use mongo-durable resolve`);
  }

  // A stored value for the check: integers as bigint, whatever BSON type they have; an object without a prototype.
  function forCheck(tree) {
    if (typeof tree === "number") return Number.isInteger(tree) ? BigInt(tree) : tree;
    if (tree === null || typeof tree !== "object") return tree;
    if (Array.isArray(tree)) return tree.map(forCheck);
    switch (tree._bsontype) {
      case "Long":
        return BigInt(tree.toString());
      case "Int32":
      case "Double":
        return forCheck(tree.valueOf());
      case "Binary":
        return { [BYTES]: tree.toString("base64") }; // of no type that a schema knows
    }
    if (tree[ENVELOPE] === "int") return BigInt(tree.value.replace("-", "")) * (tree.value.startsWith("-") ? -1n : 1n);
    const fields = Object.create(null);
    if (tree[ENVELOPE] === "dict") {
      for (const [key, value] of tree.value) fields[key] = forCheck(value);
    } else if (tree[ENVELOPE] !== undefined) {
      throw unchecked(`a value of type ${tree[ENVELOPE]}`);
    } else {
      for (const key of Object.keys(tree)) fields[key] = forCheck(tree[key]);
    }
    return fields;
  }

  const isBytes = (value) => typeof value === "object" && value !== null && BYTES in value;
  const isNumber = (value) => typeof value === "number" || typeof value === "bigint";
  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value) && !isBytes(value);
  const TYPES = {
    null: (value) => value === null,
    boolean: (value) => typeof value === "boolean",
    string: (value) => typeof value === "string",
    integer: (value) => typeof value === "bigint",
    number: isNumber,
    array: Array.isArray,
    object: isObject,
  };

  function isSame(one, other) {
    if (Array.isArray(one)) return Array.isArray(other) && one.length === other.length && one.every((item, index) => isSame(item, other[index]));
    if (!isObject(one) || !isObject(other)) return one === other || (isBytes(one) && isBytes(other) && one[BYTES] === other[BYTES]);
    const keys = Object.keys(one);
    return keys.length === Object.keys(other).length && keys.every((key) => key in other && isSame(one[key], other[key]));
  }

  // Python's and JavaScript's expressions differ at the edges; what both read alike is used, the rest is not guessed.
  function matches(pattern, text) {
    const classes = /\\[dDwWsSbB]/.test(pattern);
    const isShared = !/\\[^dDwWsSbB\\\/^$.*+?()[\]{}|tnrfv-]|\(\?(?![:=!])|\[[^\]]*(--|&&|\|\||~~)/.test(pattern);
    const hasEdges = (classes && /[^\x20-\x7e]/.test(text)) || (/[.$]/.test(pattern) && /[\r\n\u2028\u2029]/.test(text));
    if (!isShared || hasEdges) throw unchecked(`the pattern ${JSON.stringify(pattern)}, which may mean something else here`);
    try {
      return new RegExp(pattern, "u").test(text);
    } catch (error) {
      throw unchecked(`the pattern ${JSON.stringify(pattern)}, which mongosh does not understand`);
    }
  }

  function atPointer(root, reference) {
    let found = root;
    if (!/^#(\/|$)/.test(reference)) throw unchecked(`a reference to ${reference}`);
    for (const step of reference.split("/").slice(1)) {
      const key = decodeURIComponent(step).replaceAll("~1", "/").replaceAll("~0", "~");
      found = isObject(found) && key in found ? found[key] : undefined;
    }
    if (found === undefined) throw unchecked(`a reference to ${reference}, which is not there`);
    return found;
  }

  const least = (name, limit, holds) => (holds ? [] : [`${name} is ${limit}`]);
  const sizeOf = (text) => BigInt([...text].length);

  // keyword: (its value, the value to check, {schema, root, path, depth}) => what is wrong
  const KEYWORDS = {
    type(types, value) {
      const names = Array.isArray(types) ? types : [types];
      const unknown = names.find((name) => !(name in TYPES));
      if (unknown !== undefined) throw unchecked(`the type ${unknown}`);
      return names.some((name) => TYPES[name](value)) ? [] : [`is not of type ${names.join(" or ")}`];
    },
    enum: (allowed, value) => (allowed.some((each) => isSame(each, value)) ? [] : ["is none of the values allowed"]),
    const: (only, value) => (isSame(only, value) ? [] : ["is not the value required"]),
    required: (names, value) => (isObject(value) ? names.filter((name) => !(name in value)).map((name) => `lacks ${name}`) : []),
    properties(properties, value, at) {
      if (!isObject(value)) return [];
      const names = Object.keys(properties).filter((name) => name in value);
      return names.flatMap((name) => faults(properties[name], value[name], at, `.${name}`));
    },
    additionalProperties(schema, value, at) {
      if (!isObject(value)) return [];
      const names = Object.keys(value).filter((name) => !(isObject(at.schema.properties) && name in at.schema.properties));
      return names.flatMap((name) => faults(schema, value[name], at, `.${name}`));
    },
    propertyNames: (schema, value, at) => (isObject(value) ? Object.keys(value).flatMap((name) => faults(schema, name, at, `.${name}`)) : []),
    minProperties: (limit, value) => least("the least number of properties", limit, !isObject(value) || Object.keys(value).length >= limit),
    maxProperties: (limit, value) => least("the greatest number of properties", limit, !isObject(value) || Object.keys(value).length <= limit),
    prefixItems(schemas, value, at) {
      if (!Array.isArray(value)) return [];
      return schemas.slice(0, value.length).flatMap((schema, index) => faults(schema, value[index], at, `[${index}]`));
    },
    items(schema, value, at) {
      if (!Array.isArray(value)) return [];
      if (Array.isArray(schema)) throw unchecked("a list of items, as older drafts have it");
      const first = (at.schema.prefixItems || []).length;
      return value.slice(first).flatMap((item, index) => faults(schema, item, at, `[${first + index}]`));
    },
    minItems: (limit, value) => least("the least number of items", limit, !Array.isArray(value) || value.length >= limit),
    maxItems: (limit, value) => least("the greatest number of items", limit, !Array.isArray(value) || value.length <= limit),
    uniqueItems(isWanted, value) {
      if (!isWanted || !Array.isArray(value)) return [];
      return value.some((item, index) => value.slice(0, index).some((earlier) => isSame(earlier, item))) ? ["has an item twice"] : [];
    },
    minLength: (limit, value) => least("the least length", limit, typeof value !== "string" || sizeOf(value) >= limit),
    maxLength: (limit, value) => least("the greatest length", limit, typeof value !== "string" || sizeOf(value) <= limit),
    pattern: (pattern, value) => (typeof value !== "string" || matches(pattern, value) ? [] : [`does not match ${pattern}`]),
    // As the library has it: what is not a number (NaN) is neither less nor greater.
    minimum: (limit, value) => least("the minimum", limit, !isNumber(value) || !(value < limit)),
    maximum: (limit, value) => least("the maximum", limit, !isNumber(value) || !(value > limit)),
    exclusiveMinimum: (limit, value) => least("what it has to exceed", limit, !isNumber(value) || !(value <= limit)),
    exclusiveMaximum: (limit, value) => least("what it has to stay below", limit, !isNumber(value) || !(value >= limit)),
    multipleOf(factor, value) {
      if (typeof factor !== "bigint") throw unchecked("a multipleOf that is no integer");
      return !isNumber(value) || (typeof value === "bigint" && value % factor === 0n) ? [] : [`is no multiple of ${factor}`];
    },
    allOf: (schemas, value, at) => schemas.flatMap((schema) => faults(schema, value, at)),
    anyOf: (schemas, value, at) => (schemas.some((schema) => !faults(schema, value, at).length) ? [] : ["fits none of the alternatives"]),
    oneOf(schemas, value, at) {
      const fitting = schemas.filter((schema) => !faults(schema, value, at).length).length;
      return fitting === 1 ? [] : [`fits ${fitting} of the alternatives, not one`];
    },
    not: (schema, value, at) => (faults(schema, value, at).length ? [] : ["is what it must not be"]),
    $ref: (reference, value, at) => faults(atPointer(at.root, reference), value, at),
    $schema(draft) {
      if (!DRAFT.test(draft)) throw unchecked(`another $schema than draft 2020-12`);
      return [];
    },
  };

  // What of a value does not fit a schema, as `path: message`.
  function faults(schema, value, at, step = "") {
    const path = at.path + step;
    if (schema === true) return [];
    if (schema === false) return [`${path}: nothing is allowed here`];
    if (!isObject(schema)) throw unchecked("a part that is no schema");
    if (at.depth > DEEPEST) throw unchecked("references without end");
    const here = { schema, root: at.root, path, depth: at.depth + 1 };
    const found = [];
    for (const keyword of Object.keys(schema)) {
      if (ANNOTATIONS.includes(keyword)) continue;
      if (!Object.hasOwn(KEYWORDS, keyword)) throw unchecked(`the keyword ${keyword}`);
      for (const fault of KEYWORDS[keyword](schema[keyword], value, here)) found.push(fault.startsWith("$") ? fault : `${path}: ${fault}`);
    }
    return found;
  }

  function checkAnswer(run, entry, answer) {
    if (entry.response_schema === null || entry.response_schema === undefined) return;
    const root = forCheck(entry.response_schema);
    const found = faults(root, forCheck(answer), { root, path: "$", depth: 0 });
    if (found.length) {
      throw failure("InvalidAnswer", `run ${run}: the answer to ${entry.activity_id} does not fit its schema: ${found.join("; ")}`);
    }
  }

  // --- the database ---------------------------------------------------------------------------------------------------------------------------------

  function database() {
    const found = chosenDatabase === null ? db : db.getSiblingDB(chosenDatabase);
    const meta = found.getCollection("meta").findOne({ _id: "schema" });
    if (meta === null) {
      const what = `database ${JSON.stringify(found.getName())} has no mongo_durable collections`;
      throw failure("ConfigurationError", `${what}: durable.use("its name") chooses another one; \`mongo-durable init\` sets a new one up`);
    }
    checkVersion(meta);
    return found;
  }

  function checkVersion(document) {
    if (document.schema_version > SCHEMA_VERSION) {
      const what = `schema version ${document.schema_version} is newer than this script, which knows ${SCHEMA_VERSION}`;
      throw failure("SchemaVersionMismatch", `${what}: load the durable.js of the mongo_durable release that wrote it`);
    }
  }

  // Another database than the one that mongosh is connected to; null goes back to that.
  function use(name) {
    const before = chosenDatabase;
    chosenDatabase = name;
    if (name === null) return "using the database that mongosh is connected to";
    try {
      database();
    } catch (error) {
      chosenDatabase = before;
      throw error;
    }
    return `using database ${name}`;
  }

  // One document, majority-committed, from the primary.
  function read(collection, filter, sort = {}) {
    const found = collection.find(filter).sort(sort).limit(1).readConcern("majority").readPref("primary").toArray();
    if (!found.length) return null;
    checkVersion(found[0]);
    return found[0];
  }

  // Runs a body in one transaction: snapshot, majority, primary. It may run more than once: the driver repeats what the server calls transient.
  function transaction(where, body) {
    const session = where.getMongo().startSession();
    let result;
    try {
      session.withTransaction(
        () => {
          result = body(session.getDatabase(where.getName()));
        },
        { readConcern: { level: "snapshot" }, writeConcern: { w: "majority" }, readPreference: "primary" },
      );
    } catch (error) {
      if (error.errorLabels && error.errorLabels.includes("UnknownTransactionCommitResult")) {
        throw failure("CommitUnknown", "the answer to the commit was lost; you cannot know whether it succeeded: look, or do the same again");
      }
      throw error;
    } finally {
      session.endSession();
    }
    return result;
  }

  // Compare-and-set on a head, always the first write: the one document of a run serialises everything that concerns it.
  function moveHead(where, expected, change, options = {}) {
    const found = where.getCollection("runs").findOneAndUpdate(expected, [{ $set: change }], { returnDocument: "after", ...options });
    if (found === null) throw lost();
    return found;
  }

  function closeFrontier(where, expected, status) {
    const closed = where.getCollection("frontiers").updateOne(expected, [{ $set: { status, closed_at: "$$NOW" } }]);
    if (closed.matchedCount !== 1) throw lost();
  }

  // Tells the runners that a run can be claimed, and of which workflow it is.
  const NEWS = { news: { $concat: ["$workflow.name", "\n", "$workflow.version", "\n", { $dateToString: { date: "$$NOW" } }] } };

  function insertEvent(where, event) {
    const { run_id, seq, fence, type, ...rest } = event;
    const common = { _id: new ObjectId(), run_id, seq, fence, type, at: new Date(), schema_version: SCHEMA_VERSION };
    where.getCollection("activity_events").insertOne({ ...common, ...rest });
  }

  function headOf(where, run) {
    if (typeof run !== "string") throw failure("ConfigurationError", "a run is named by its id, a text");
    const head = read(where.getCollection("runs"), { _id: run });
    if (head === null) throw failure("RunNotFound", `there is no run ${JSON.stringify(run)} in database ${JSON.stringify(where.getName())}`);
    return head;
  }

  function only(options, known) {
    const unknown = Object.keys(options).filter((name) => !known.includes(name));
    if (unknown.length) throw failure("ConfigurationError", `unknown option ${unknown.join(", ")}: there are ${known.join(", ")}`);
  }

  function textOrNull(name, value) {
    if (value === undefined || value === null) return null;
    if (typeof value !== "string") throw failure("ConfigurationError", `${name} is a text`);
    return value;
  }

  // --- answering ------------------------------------------------------------------------------------------------------------------------------------

  const INLINE_LIMIT = 256 * 1024;
  const DOCUMENT_BUDGET = 4 * 1024 * 1024;

  function newestFrontier(where, run) {
    const head = headOf(where, run);
    const frontier = read(where.getCollection("frontiers"), { run_id: run }, { generation: -1 });
    if (frontier === null) throw failure("RunNotSuspended", `run ${run} is ${head.status} and waits for no answer`);
    return frontier;
  }

  // Records all answers of the run's newest frontier at once, or nothing.
  function resolve(run, answers, options = {}) {
    only(options, ["by", "note", "generation", "digest"]);
    const resolvedBy = textOrNull("by", options.by);
    const note = textOrNull("note", options.note);
    const where = database();
    const frontier = newestFrontier(where, run);
    checkPins(frontier, options);
    if (!isPlainObject(answers)) {
      throw failure("IncompleteResolution", "answers are {activity_id: answer, …}; durable.answer(run, answer) answers the only question of a run");
    }
    checkComplete(frontier, answers);
    frontier.entries.forEach((entry) => refuseSealed(run, entry));
    const stored = {};
    let size = 0;
    for (const id of Object.keys(answers)) {
      stored[id] = encode(answers[id], id);
      const bytes = bsonsize({ v: stored[id] });
      size += bytes;
      if (bytes > INLINE_LIMIT || size > DOCUMENT_BUDGET) {
        throw failure("PayloadTooLarge", `run ${run}: the answer to ${id} is too large for mongosh (more than 256 KB); use mongo-durable resolve`);
      }
    }
    for (const entry of frontier.entries) checkAnswer(run, entry, stored[entry.activity_id]);
    const answersDigest = digest(stored);
    try {
      return receipt(transaction(where, (inside) => writeResolution(inside, frontier, stored, answersDigest, resolvedBy, note)));
    } catch (error) {
      if (!isLost(error)) throw error;
      return receipt(whyLost(where, frontier, answersDigest));
    }
  }

  function checkPins(frontier, options) {
    for (const name of ["generation", "digest"]) {
      const expected = options[name];
      if (expected === undefined || expected === null || String(expected) === String(frontier[name])) continue;
      const what = `the answers are for ${name} ${expected}, the run has ${name} ${frontier[name]}`;
      throw failure("StaleGeneration", `run ${frontier.run_id}: ${what}: read its open frontier again`);
    }
  }

  // Only who has the key knows what is asked, and can store an answer that is encrypted like the rest of the run.
  function refuseSealed(run, entry) {
    if (!isSealed(entry.value)) return;
    const what = `the question ${entry.activity_id} is encrypted with key ${JSON.stringify(entry.value.value.key)}`;
    throw failure("DecryptionFailed", `run ${run}: ${what}; answer with mongo-durable resolve, which takes MONGO_DURABLE_KEYS`);
  }

  function checkComplete(frontier, answers) {
    const asked = frontier.entries.map((entry) => entry.activity_id);
    const given = Object.keys(answers);
    const extra = given.filter((id) => !asked.includes(id));
    const missing = asked.filter((id) => !given.includes(id));
    if (extra.length && extra.length === given.length) {
      const where = `its open frontier (generation ${frontier.generation})`;
      throw failure("UnknownActivity", `run ${frontier.run_id}: none of the answered activity ids is in ${where}; it asks ${asked.join(", ")}`);
    }
    if (missing.length || extra.length) {
      const what = `missing: ${missing.join(", ") || "none"}; not in it: ${extra.join(", ") || "none"}`;
      throw failure("IncompleteResolution", `run ${frontier.run_id}: a frontier is answered whole; ${what}`);
    }
  }

  function writeResolution(where, frontier, answers, answersDigest, resolvedBy, note) {
    const { run_id, generation, fence } = frontier;
    const seq = frontier.seq + 1; // nothing can follow a suspension but what the head serialises
    const suspended = { _id: run_id, status: "suspended", generation };
    const head = moveHead(where, suspended, { ...NEWS, status: "ready", available_at: "$$NOW" });
    const inTime = { $or: [{ $eq: ["$expires_at", null] }, { $gt: ["$expires_at", "$$NOW"] }] };
    closeFrontier(where, { _id: frontier._id, status: "open", $expr: inTime }, "resolved");
    const said = { resolved_by: resolvedBy, note, channel: CHANNEL };
    const resolution = {
      _id: frontier._id,
      run_id,
      schema_version: SCHEMA_VERSION,
      generation,
      seq,
      answers,
      answers_digest: answersDigest,
      ...said,
      at: head.available_at,
    };
    where.getCollection("resolutions").insertOne(resolution);
    insertEvent(where, { run_id, seq, fence, type: "activities.resolved", generation, answers, ...said });
    return resolution;
  }

  // Reads in a transaction that commits with majority: a plain majority read may not see the winner yet.
  function whyLost(where, frontier, answersDigest) {
    const { _id, run_id: run, generation } = frontier;
    const [resolution, stored, head] = transaction(where, (inside) => {
      const resolution = inside.getCollection("resolutions").findOne({ _id });
      const stored = inside.getCollection("frontiers").findOne({ _id });
      const head = inside.getCollection("runs").findOne({ _id: run });
      return [resolution, stored, head];
    });
    const isWaiting = head !== null && head.status === "suspended" && head.generation === generation;
    if (isWaiting && resolution !== null && stored !== null && stored.status === "open") {
      const what = `generation ${generation} is open, and a resolution stands beside it that somebody has inserted by hand`;
      throw failure("CorruptHistory", `run ${run}: ${what}: remove it, and answer`);
    }
    if (resolution !== null) {
      if (resolution.answers_digest === answersDigest) return resolution;
      throw failure("ResolutionConflict", `run ${run}: generation ${generation} was answered before with other answers; the first ones stand`);
    }
    if (head === null || stored === null) throw failure("RunNotFound", `run ${run} or its frontier ${generation} is gone`);
    if ((stored.status === "open" && stored.expires_at !== null && head.status === "suspended") || stored.status === "expired") {
      const deadline = stored.expires_at || head.deadline_at;
      throw failure("FrontierExpired", `run ${run}: generation ${generation} passed its deadline at ${moment(deadline)}`);
    }
    if (isWaiting) throw failure("CorruptHistory", `run ${run}: generation ${generation} can take no answer: an event stands behind it already`);
    if (head.generation !== generation) {
      throw failure("StaleGeneration", `run ${run} is at generation ${head.generation}, the answers are for ${generation}`);
    }
    throw failure("RunNotSuspended", `run ${run} is ${head.status} and waits for no answer`);
  }

  function receipt(resolution) {
    const { run_id: run, generation, answers_digest, resolved_by, note, at: resolved_at } = resolution;
    const said = `run ${shown(run)}: generation ${generation} is answered; a runner goes on with it`;
    return withText({ run, generation, answers_digest, resolved_by: resolved_by || null, note: note || null, resolved_at }, said);
  }

  // Answers the only open question of a run.
  function answer(run, value, options = {}) {
    const { entries } = newestFrontier(database(), run);
    if (entries.length !== 1) {
      const ids = entries.map((entry) => entry.activity_id).join(", ");
      throw failure("IncompleteResolution", `run ${run} has ${entries.length} open questions: durable.resolve(run, {…}) with an answer to each of ${ids}`);
    }
    return resolve(run, { [entries[0].activity_id]: value }, options);
  }

  // --- cancelling -----------------------------------------------------------------------------------------------------------------------------------

  // Ends a suspended run. Any other one is marked: from here whoever executes or claims it has to end it.
  function cancel(run, options = {}) {
    only(options, ["reason"]);
    const reason = textOrNull("reason", options.reason);
    const where = database();
    for (let tried = 0; tried < CANCEL_TRIES; tried++) {
      const head = headOf(where, run);
      if (ENDED.includes(head.status)) return cancelled(head);
      try {
        if (head.status !== "suspended") return marked(where, markForCancel(where, head, reason));
        transaction(where, (inside) => cancelSuspended(inside, head, reason));
      } catch (error) {
        if (!isLost(error)) throw error; // the run moved in between; look again
      }
    }
    throw failure("StoreUnavailable", `run ${run} moved ${CANCEL_TRIES} times while it was to be cancelled: try again`);
  }

  function cancelled(head) {
    const how = head.status === "cancelled" ? "is cancelled" : `had ended as ${head.status} before it could be cancelled`;
    return withText({ run: head._id, status: head.status }, `run ${shown(head._id)} ${how}`);
  }

  const mark = (reason, more = {}) => ({ at: "$$NOW", reason: { $literal: reason }, is_deadline: false, ...more });

  function cancelSuspended(where, head, reason) {
    const { _id: run_id, generation, fence } = head;
    const frontierId = `${run_id}/${generation}`;
    const expected = { _id: run_id, status: "suspended", generation };
    const change = { owner: null, place: "$$REMOVE", news: "$$REMOVE", status: "cancelled", ended_at: "$$NOW", error: null, cancel: mark(reason) };
    moveHead(where, expected, change);
    const frontier = where.getCollection("frontiers").findOne({ _id: frontierId }, { seq: 1 });
    if (frontier === null) throw failure("CorruptHistory", `run ${run_id} is suspended, and its frontier ${generation} is gone`);
    closeFrontier(where, { _id: frontierId, status: "open" }, "cancelled");
    freeThread(where, head);
    insertEvent(where, { run_id, seq: frontier.seq + 1, fence, type: "run.cancelled", reason });
  }

  // The run no longer holds its thread; the oldest run that is queued on it, if any, takes it.
  function freeThread(where, head) {
    const threads = where.getCollection("threads");
    const held = { _id: head.thread_id, active_run: head._id };
    const thread = threads.findOneAndUpdate(held, { $set: { active_run: null } }, { returnDocument: "after" });
    if (thread === null || !thread.queued) return;
    const turn = thread.turn + 1;
    const change = { ...NEWS, is_queued: false, turn, base_turn: thread.committed_turn, available_at: { $max: ["$available_at", "$$NOW"] } };
    const following = where
      .getCollection("runs")
      .findOneAndUpdate(
        { thread_id: head.thread_id, status: "pending", is_queued: true },
        [{ $set: change }],
        { sort: { submitted_at: 1, _id: 1 }, returnDocument: "after" },
      );
    if (following === null) threads.updateOne({ _id: head.thread_id }, { $set: { queued: 0 } }); // the queued ones were cancelled
    else threads.updateOne({ _id: head.thread_id }, { $set: { active_run: following._id, turn }, $inc: { queued: -1 } });
  }

  // The channel says that the runners have to see to it: the library takes a run over itself, which needs more than mongosh has.
  function markForCancel(where, head, reason) {
    const change = { cancel: { $ifNull: ["$cancel", mark(reason, { channel: CHANNEL })] } };
    if (head.status !== "running" && !head.is_queued) Object.assign(change, NEWS, { available_at: "$$NOW" }); // so that it is claimed at once
    return moveHead(where, { _id: head._id, status: head.status }, change);
  }

  function marked(where, head) {
    const version = `${head.workflow.name} ${head.workflow.version}`;
    let who = "its process ends it before its next effect";
    if (head.is_queued) who = "it is ended when its thread is free";
    else if (head.status !== "running") {
      const serving = { state: "live", "serves.name": head.workflow.name, $expr: { $gt: ["$expires_at", "$$NOW"] } };
      const runners = where.getCollection("runners").find(serving).toArray();
      const isServed = runners.some((runner) => runner.serves.some((each) => each.name === head.workflow.name && each.version === head.workflow.version));
      who = isServed ? `a runner that serves ${version} ends it` : `no live runner serves ${version}`;
    }
    const said = `run ${shown(head._id)} is ${head.status} and marked to be cancelled: ${who}. To end it at once: mongo-durable cancel ${head._id}`;
    return withText({ run: head._id, status: head.status, is_marked: true }, said);
  }

  // --- looking --------------------------------------------------------------------------------------------------------------------------------------

  // A value for programs, which mongosh shows as text.
  function withText(value, text) {
    Object.defineProperty(value, Symbol.for("nodejs.util.inspect.custom"), { value: () => text, enumerable: false });
    return value;
  }

  // Names and values come from workflows: nothing in them may steer the terminal.
  const shown = (text) => String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (each) => "\\u" + each.codePointAt(0).toString(16).padStart(4, "0"));

  const moment = (date) => (date ? date.toISOString().replace("T", " ").replace(/\.\d+Z$/, "Z") : "-");

  const isSealed = (value) => isPlainObject(value) && value[ENVELOPE] === "encrypted:value";

  function oneLine(value, longest = 120) {
    if (isSealed(value)) return `(encrypted with key ${shown(JSON.stringify(value.value.key))})`;
    const isApart = isPlainObject(value) && value[ENVELOPE] === "payload";
    if (isApart) return `(${Math.ceil(value.value.size / 1000)} kB, stored apart: mongo-durable show brings it in)`;
    let text;
    try {
      text = EJSON.stringify(value) ?? "-";
    } catch (error) {
      text = JSON.stringify(value); // with a key that has a meaning for the driver, such as _bsontype
    }
    return shown(text.length <= longest ? text : text.slice(0, longest - 1) + "…");
  }

  function table(rows, columns) {
    if (!rows.length) return "";
    const cells = [columns, ...rows.map((row) => columns.map((name) => (row[name] instanceof Date ? moment(row[name]) : shown(row[name] ?? ""))))];
    const widths = columns.map((_, index) => Math.max(...cells.map((row) => row[index].length)));
    return cells.map((row) => row.map((cell, index) => cell.padEnd(widths[index])).join("  ").trimEnd()).join("\n");
  }

  // What waits for answers, oldest first.
  function frontiers(filter = {}) {
    const rows = database().getCollection("open_frontiers").find(filter).limit(1000).toArray();
    if (!rows.length) return withText(rows, "nothing waits for an answer");
    const lines = [];
    rows.forEach((row, index) => {
      const before = rows[index - 1];
      if (!before || before.run !== row.run) {
        lines.push(`run ${shown(row.run)}  ${shown(row.workflow)}  generation ${row.generation}  waits for ${row.age}`);
      }
      const until = row.expires_at ? `  (until ${moment(row.expires_at)})` : "";
      lines.push(`  ${row.activity_id}  ${shown(row.name)} asks ${oneLine(row.question)}${until}`);
      const next = rows[index + 1];
      if (!next || next.run !== row.run) lines.push(`  answer with ${shown(row.answer_in_mongosh)}`);
    });
    return withText(rows, lines.join("\n"));
  }

  // What happened to a run, one line an event.
  function timeline(run) {
    const where = database();
    headOf(where, run);
    const rows = where.getCollection("run_timeline").find({ run }).toArray();
    return withText(rows, table(rows, ["seq", "at", "attempt", "event", "what", "how_long"]));
  }

  // A run on one page: its state, what each attempt did, what was asked and answered.
  function show(run) {
    const where = database();
    const head = headOf(where, run);
    const events = where.getCollection("run_timeline").find({ run }).toArray();
    const asked = where.getCollection("frontiers").find({ run_id: run }).sort({ generation: 1 }).toArray();
    const resolutions = where.getCollection("resolutions").find({ run_id: run }).toArray();
    const reasons = ENDED.includes(head.status) ? [] : reasonsOf(where, head);
    const lines = [`run ${shown(run)}  ${shown(head.workflow.name)} ${shown(head.workflow.version)}  ${head.status}  thread ${shown(head.thread_id)}`];
    lines[0] += `  submitted ${moment(head.submitted_at)}${head.ended_at ? `  ended ${moment(head.ended_at)}` : ""}`;
    lines.push(`  input ${oneLine(head.input)}`);
    const finished = events.filter((row) => row.activity_id && row.event !== "activity.started").map((row) => row.activity_id);
    for (const row of events) {
      const isLeftOut = ["run.submitted", "step.committed"].includes(row.event) || (row.event === "activity.started" && finished.includes(row.activity_id));
      if (row.event === "attempt.started") lines.push(`  attempt ${row.attempt}  ${shown(row.what)}  ${moment(row.at)}`);
      else if (!isLeftOut) lines.push(`    ${[row.event, shown(row.what), row.how_long].filter(Boolean).join("  ")}`);
      const suspended = row.event === "activities.suspended" ? asked.find((each) => each.seq === row.seq) : undefined;
      if (suspended) lines.push(...questions(suspended, resolutions.find((each) => each._id === suspended._id)));
    }
    if (head.output !== null && head.output !== undefined) lines.push(`  output ${oneLine(head.output, 400)}`);
    if (head.error) lines.push(`  error ${shown(head.error.type)}: ${shown(head.error.message)}`);
    for (const reason of reasons) lines.push(`  ${shown(reason)}`);
    return withText({ run, head, events, frontiers: asked, resolutions, why: reasons }, lines.join("\n"));
  }

  function questions(frontier, resolution) {
    const lines = [`    frontier ${frontier.generation}  ${frontier.status}`];
    for (const entry of frontier.entries) {
      lines.push(`      ${entry.activity_id}  ${shown(entry.name)} asks ${oneLine(entry.value)}`);
      if (resolution) lines.push(`        answer ${oneLine(resolution.answers[entry.activity_id])}`);
    }
    return lines;
  }

  // Why a run does not go on, or what it waits for.
  function why(run) {
    const where = database();
    const head = headOf(where, run);
    const reasons = reasonsOf(where, head);
    return withText({ run, status: head.status, why: reasons }, `run ${shown(run)} is ${head.status}: ${reasons.map(shown).join("\n  ")}`);
  }

  function reasonsOf(where, head) {
    if (ENDED.includes(head.status)) return [`it has ended, ${moment(head.ended_at)}`];
    const found = [];
    if (head.cancel) found.push("it is marked to be stopped: whoever executes or claims it ends it");
    const stuck = where.getCollection("stuck_runs").findOne({ run: head._id });
    if (stuck !== null) return [...found, stuck.why];
    if (head.status === "suspended") return [...found, ...openQuestions(where, head)];
    if (head.status === "running") return [...found, `process ${head.owner} executes it, attempt ${head.fence}, since ${moment(head.claimed_at)}`];
    return [...found, waitsFor(where, head)];
  }

  function openQuestions(where, head) {
    const rows = where.getCollection("open_frontiers").find({ run: head._id }).toArray();
    const deadline = head.available_at ? `, until ${moment(head.available_at)}` : "";
    const asked = rows.length === 1 ? "an answer" : `${rows.length} answers`;
    return [`it has waited for ${asked} for ${rows[0].age}${deadline}: ${rows[0].answer_in_mongosh}`];
  }

  function waitsFor(where, head) {
    const now = where.hello().localTime;
    if (head.is_queued) {
      const thread = where.getCollection("threads").findOne({ _id: head.thread_id });
      return `run ${thread && thread.active_run} is live on its thread ${head.thread_id}`;
    }
    if (head.available_at > now) return `it is not to go on before ${moment(head.available_at)}`;
    if (head.limit) {
      const places = [];
      for (let number = 0; number < head.limit.running; number++) places.push(`${head.limit.key}#${number}`);
      const taken = where.getCollection("runs").countDocuments({ place: { $in: places } });
      if (taken >= head.limit.running) return `all ${head.limit.running} places of limit ${head.limit.key} are taken`;
    }
    return `it waits for its turn: a live runner serves ${head.workflow.name} ${head.workflow.version}`;
  }

  function help() {
    return withText(
      {},
      [
        "durable.frontiers()                    what waits for answers, oldest first",
        "durable.show(run)                      a run on one page: attempts, questions, answers, end",
        "durable.timeline(run)                  what happened, one line an event",
        "durable.why(run)                       why it does not go on, or what it waits for",
        "durable.answer(run, answer, {by, note})                    answers the only open question of a run",
        "durable.resolve(run, {activity_id: answer, …}, {by, note, generation, digest})",
        "                                       answers all open questions, at once; generation and digest pin what you saw",
        "durable.cancel(run, {reason})          ends a suspended run, marks any other one for its runner",
        "durable.use(database)                  another database than the one mongosh is connected to",
        "",
        "An answer is any JSON value. A whole number is an integer, Double(1) a floating-point number, Long(\"…\") a large integer.",
        "The views behind it: db.open_frontiers, db.run_timeline, db.stuck_runs. Never write to the collections by hand.",
      ].join("\n"),
    );
  }

  // What is compared with the library's, value by value.
  const internals = {
    digest: (value) => digest(encode(value)),
    faults: (schema, value) => faults(forCheck(encode(schema)), forCheck(encode(value)), { root: forCheck(encode(schema)), path: "$", depth: 0 }),
  };

  return { frontiers, show, timeline, why, answer, resolve, cancel, use, help, internals };
})();
