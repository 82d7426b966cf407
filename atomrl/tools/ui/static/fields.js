// Values of a form's fields: as they are written, where they stand in a config, and whether they are of their key's kind.
import { t } from "./i18n.js";

/** A value as it is written in a field: YAML, on one line. */
export const written = (value) => (value === null || value === undefined ? "" : typeof value === "string" ? value : flow(value));

/** As YAML on one line, texts without quotes where they need none. */
function flow(value) {
  if (typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3) return value.toExponential().replace(/^(-?\d+)e/, "$1.0e");
  if (typeof value === "string") return /^[A-Za-z_./][\w./:+ -]*$/.test(value) && !/^(true|false|null|yes|no|on|off)$|: | $/i.test(value) ? value : JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map(flow).join(", ")}]`;
  if (value && typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `${flow(key)}: ${flow(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

/** The value of a key among dotted keys; of a table, of what stands below it. */
export function valueAt(given, key) {
  if (key in given) return given[key];
  const below = Object.entries(given).filter(([name]) => name.startsWith(`${key}.`));
  return below.length ? Object.fromEntries(below.map(([name, value]) => [name.slice(key.length + 1), value])) : undefined;
}

/**
 * Which key a field changes, and what it has as text. An axis may be given as its type alone (`clip: cispo`), or as a
 * list, which is then written by hand (`own`).
 */
export function placeOf(item, given) {
  const parent = item.key.endsWith(".type") ? item.key.slice(0, -5) : null;
  const short = parent && given[parent];
  if (Array.isArray(short)) return { key: parent, text: written(short), own: true };
  if (typeof short === "string") return { key: parent, text: short, own: false };
  const value = valueAt(given, item.key);
  return { key: item.key, text: value === null ? "null" : written(value), own: false };
}

/** Why a text is no value of a key; null where it may be one, which the schema then says. */
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
