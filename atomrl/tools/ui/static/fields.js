// Values of form fields: their text, their place in a config, and checks of their type.
import { t } from "./i18n.js";

/** The text of a value in a field: YAML, on one line. */
export const written = (value) => (value === null || value === undefined ? "" : typeof value === "string" ? value : flow(value));

/** Format as YAML on one line; text is quoted only if needed. */
function flow(value) {
  if (typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3) return value.toExponential().replace(/^(-?\d+)e/, "$1.0e");
  if (typeof value === "string") return /^[A-Za-z_./][\w./:+ -]*$/.test(value) && !/^(true|false|null|yes|no|on|off)$|: | $/i.test(value) ? value : JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map(flow).join(", ")}]`;
  if (value && typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `${flow(key)}: ${flow(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

/** The value of a key in a flat config; for a section, the values below it. */
export function valueAt(given, key) {
  if (key in given) return given[key];
  const below = Object.entries(given).filter(([name]) => name.startsWith(`${key}.`));
  return below.length ? Object.fromEntries(below.map(([name, value]) => [name.slice(key.length + 1), value])) : undefined;
}

/**
 * The key that a field changes, and its text. A choice may be given by its type alone (`clip: cispo`), or as a list,
 * which can only be edited as YAML (`own`).
 */
export function placeOf(item, given) {
  const parent = item.key.endsWith(".type") ? item.key.slice(0, -5) : null;
  const short = parent && given[parent];
  if (Array.isArray(short)) return { key: parent, text: written(short), own: true };
  if (typeof short === "string") return { key: parent, text: short, own: false };
  const value = valueAt(given, item.key);
  return { key: item.key, text: value === null ? "null" : written(value), own: false };
}

/** Return why a text is not a valid value of a key, or null if only the schema can tell. */
export function wrong(item, text) {
  const plain = text.trim();
  if (plain === "") return item.required && item.key !== "model.path" ? t("is_required") : null;
  if (plain === "null" || plain === "~") return item.default === null || item.of ? null : t("not_null");
  if (item.words && item.words.includes(plain)) return null;
  if (item.kind === "boolean") return /^(true|false)$/i.test(plain) ? null : t("needs_boolean");
  if (item.kind === "choice") return plain.startsWith("[") || item.choices.includes(plain) ? null : t("one_of", { choices: item.choices.join(", ") });
  if (item.kind === "text") return item.pattern && !new RegExp(item.pattern).test(plain) ? t("needs_pattern", { pattern: item.pattern }) : null;
  if (item.kind === "integer" && !/^[+-]?\d+$/.test(plain)) return t("needs_integer");
  if (item.kind === "number" && !Number.isFinite(Number(plain))) return t("needs_number");
  if (item.kind !== "integer" && item.kind !== "number") return null;
  const value = Number(plain);
  if (item.least !== undefined && value < item.least) return t("needs_least", { n: item.least });
  if (item.above !== undefined && value <= item.above) return t("needs_above", { n: item.above });
  if (item.most !== undefined && value > item.most) return t("needs_most", { n: item.most });
  return item.below !== undefined && value >= item.below ? t("needs_below", { n: item.below }) : null;
}
