"use strict";
/* Markdown -> DOM nodes. Text only ever becomes text nodes: no HTML is parsed, no address is fetched, and a link is a
   link only if it begins with http://, https:// or mailto:. Images are shown as links.

   Whatever the text, the time is in proportion to its length, with at most MOST_DEPTH passes: each pass goes from left to
   right and never looks again for what it did not find. A regular expression here has no two ways to match a text. */

const Markdown = (() => {
  const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
  const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
  const RULE = /^ {0,3}[-*_]/;
  const BULLET = /^(\s*)([-*+])\s+(.*)$/;
  const NUMBER = /^(\s*)(\d{1,9})[.)]\s+(.*)$/;
  const QUOTE = /^ {0,3}> ?(.*)$/;
  const LINE_ENDS = /\r\n?|[\u2028\u2029]/g; /* `.` stops at each of them */
  const SAFE_LINK = /^(https?:\/\/|mailto:)[^\s]+$/i;
  const MOST_DEPTH = 12;
  const MOST_CHARACTERS = 100_000; /* what follows is shown as it is */
  const MOST_SPAN = 2000; /* characters of bold, of an address */

  function element(name, children = [], className = "") {
    const node = document.createElement(name);
    if (className) node.className = className;
    for (const child of children) node.append(child); /* not spread: there may be more than a call takes */
    return node;
  }

  /* ---------- inside a line ---------- */

  const SPECIAL = /[`\\![<*~_]|https?:\/\//g;
  const ESCAPE = /\\([\\`*_{}[\]()#+\-.!|~>])/y;
  const LINK = /!?\[([^[\]\n]{1,500})\]\(\s{0,99}<?([^\s<>)[]{1,2000})>?(?:\s{1,99}["'][^"'\n]{0,500}["'])?\s{0,99}\)/y;
  const POINTED = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
  const BARE = /https?:\/\/[^\s<>"'`）】」』，。；：！？]{1,2000}/y;
  const EMPHASIS = {
    "*": /\*(?=[^\s*])([^*\n]{0,2000}?[^\s*])\*(?!\*)/y,
    "_": /(?<![\p{L}\p{N}_])_(?=[^\s_])([^_\n]{0,2000}?[^\s_])_(?![\p{L}\p{N}_])/uy,
  };

  /* Places in order, asked for from left to right: the first at or after `least`. */
  function places(list) {
    let next = 0;
    return (least) => {
      while (next < list.length && list[next] < least) next += 1;
      return next < list.length ? list[next] : -1;
    };
  }

  /* By length, where runs of so many backticks begin. */
  function backtickRuns(text) {
    const found = new Map();
    for (const run of text.matchAll(/`+/g)) {
      if (!found.has(run[0].length)) found.set(run[0].length, []);
      found.get(run[0].length).push(run.index);
    }
    for (const [length, list] of found) found.set(length, places(list));
    return found;
  }

  /* Where a mark of two characters may end something: after what is not white space. */
  function ends(text, mark) {
    const list = [];
    for (let at = text.indexOf(mark, 1); at >= 0; at = text.indexOf(mark, at + 1)) {
      if (/\S/.test(text[at - 1])) list.push(at);
    }
    return places(list);
  }

  /* Each takes what begins at `at`: its node and where it ends; null: it is plain text. */
  function inlineRules(text, depth) {
    let runs = null;
    const closing = {};
    const match = (pattern, at, make) => {
      pattern.lastIndex = at;
      const found = pattern.exec(text);
      return found && [make(found), at + found[0].length];
    };
    const paired = (mark, name, at) => {
      if (!text.startsWith(mark, at) || /\s|^$/.test(text.charAt(at + 2))) return null;
      closing[mark] ??= ends(text, mark);
      const end = closing[mark](at + 3);
      if (end < 0 || end > at + 2 + MOST_SPAN) return null;
      return [element(name, inline(text.slice(at + 2, end), depth + 1)), end + 2];
    };
    const emphasis = (at) => match(EMPHASIS[text[at]], at, (m) => element("em", inline(m[1], depth + 1)));
    const linked = (at) => match(LINK, at, (m) => link(m, depth + 1));
    const code = (at) => {
      let begin = at;
      while (text[begin] === "`") begin += 1;
      runs ??= backtickRuns(text);
      const end = runs.get(begin - at)?.(begin) ?? -1;
      if (end < 0) return [text.slice(at, begin), begin];
      return [element("code", [text.slice(begin, end).replace(/^ (.*) $/s, "$1")]), end + begin - at];
    };
    return {
      "`": code,
      "\\": (at) => match(ESCAPE, at, (m) => document.createTextNode(m[1])),
      "!": linked,
      "[": linked,
      "<": (at) => match(POINTED, at, (m) => anchor(m[1], [m[1]])),
      "h": (at) => bareLink(match(BARE, at, (m) => m[0]), at),
      "*": (at) => paired("**", "strong", at) || emphasis(at),
      "~": (at) => paired("~~", "del", at),
      "_": emphasis,
    };
  }

  function inline(text, depth = 0) {
    if (depth > MOST_DEPTH) return [text];
    const nodes = [];
    const rules = inlineRules(text, depth);
    let plain = 0; /* where the plain text begins that is not yet in `nodes` */
    let at = 0;
    for (;;) {
      SPECIAL.lastIndex = at;
      const special = SPECIAL.exec(text);
      if (!special) break;
      const made = rules[special[0][0]](special.index);
      at = made ? made[1] : special.index + 1;
      if (!made || typeof made[0] === "string") continue;
      if (plain < special.index) nodes.push(text.slice(plain, special.index));
      nodes.push(made[0]);
      plain = at;
    }
    if (plain < text.length) nodes.push(text.slice(plain));
    return nodes;
  }

  function link(match, depth) {
    return SAFE_LINK.test(match[2]) ? anchor(match[2], inline(match[1], depth)) : element("span", [match[0]]);
  }

  /* What ends a sentence does not belong to the address. */
  function bareLink(found, at) {
    if (!found) return null;
    let address = found[0];
    while (".,;:!?)]}*_~".includes(address.at(-1))) address = address.slice(0, -1);
    return address.endsWith("//") ? null : [anchor(address, [address]), at + address.length];
  }

  function anchor(address, children) {
    const node = element("a", children);
    node.href = address;
    node.target = "_blank";
    node.rel = "noopener noreferrer nofollow";
    node.title = address;
    return node;
  }

  function lines(list) {
    const nodes = [];
    inline(list.join("\n")).forEach((part) => {
      if (typeof part !== "string") return nodes.push(part);
      part.split("\n").forEach((text, number) => {
        if (number) nodes.push(element("br"));
        nodes.push(text);
      });
    });
    return nodes;
  }

  /* ---------- blocks ---------- */

  function blocks(source, depth = 0) {
    const all = Array.isArray(source) ? source : source.replace(LINE_ENDS, "\n").split("\n");
    if (depth > MOST_DEPTH) return [element("p", [all.join("\n")])];
    const nodes = [];
    let at = 0;
    while (at < all.length) {
      const line = all[at];
      let match;
      if (!line.trim()) at += 1;
      else if ((match = FENCE.exec(line))) {
        const [node, next] = fenced(all, at, match);
        nodes.push(node);
        at = next;
      } else if ((match = HEADING.exec(line))) {
        nodes.push(element("h" + Math.min(6, match[1].length + 2), inline(title(match[2]))));
        at += 1;
      } else if (isRule(line)) {
        nodes.push(element("hr"));
        at += 1;
      } else if (QUOTE.test(line)) {
        const inner = [];
        while (at < all.length && (match = QUOTE.exec(all[at]))) inner.push(match[1]), (at += 1);
        nodes.push(element("blockquote", blocks(inner, depth + 1)));
      } else if (BULLET.test(line) || NUMBER.test(line)) {
        const [node, next] = listing(all, at, depth);
        nodes.push(node);
        at = next;
      } else if (line.includes("|") && at + 1 < all.length && isTableLine(all[at + 1])) {
        const [node, next] = table(all, at);
        nodes.push(node);
        at = next;
      } else {
        const paragraph = [];
        while (at < all.length && all[at].trim() && (!paragraph.length || !beginsBlock(all[at]))) {
          paragraph.push(all[at].trim());
          at += 1;
        }
        nodes.push(element("p", lines(paragraph)));
      }
    }
    return nodes;
  }

  /* A heading without the # signs that may close it. */
  function title(text) {
    const whole = text.trim();
    let end = whole.length;
    while (whole[end - 1] === "#") end -= 1;
    return end === 0 || /\s/.test(whole[end - 1]) ? whole.slice(0, end).trimEnd() : whole;
  }

  function isRule(line) {
    if (!RULE.test(line)) return false;
    const marks = line.replace(/\s/g, "");
    return marks.length > 2 && marks === marks[0].repeat(marks.length);
  }

  function isTableLine(line) {
    const cells = line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|");
    return cells.every((cell) => /^:?-+:?$/.test(cell.trim()));
  }

  function beginsBlock(line) {
    return FENCE.test(line) || HEADING.test(line) || isRule(line) || QUOTE.test(line) || BULLET.test(line) || NUMBER.test(line);
  }

  function fenced(all, at, match) {
    const [, fence, info] = match;
    const language = info.trim().split(/\s/, 1)[0];
    const inner = [];
    at += 1;
    while (at < all.length) {
      const line = all[at].trim();
      at += 1;
      if (line.startsWith(fence) && !line.replaceAll(fence[0], "")) return [codeBlock(inner.join("\n"), language), at];
      inner.push(all[at - 1]);
    }
    return [codeBlock(inner.join("\n"), language), at];
  }

  function codeBlock(text, language) {
    const head = element("div", [element("span", [language.slice(0, 40)])], "code-head");
    const copy = element("button", [], "copy quiet");
    copy.type = "button";
    copy.dataset.copy = "code";
    head.append(copy);
    const code = element("code", [text]);
    code.tabIndex = 0;
    return element("div", [head, element("pre", [code])], "code");
  }

  function listing(all, at, depth) {
    const ordered = !BULLET.test(all[at]);
    const pattern = ordered ? NUMBER : BULLET;
    const indent = pattern.exec(all[at])[1].length;
    const list = element(ordered ? "ol" : "ul");
    if (ordered) list.start = Number(pattern.exec(all[at])[2]);
    while (at < all.length) {
      const match = pattern.exec(all[at]);
      if (!match || match[1].length > indent + 1 || match[1].length < indent) break;
      const inner = [match[3]];
      at += 1;
      while (at < all.length) {
        const line = all[at];
        const deeper = line.length - line.trimStart().length > indent + 1;
        if (!line.trim() && at + 1 < all.length && all[at + 1].length - all[at + 1].trimStart().length > indent + 1) inner.push("");
        else if (line.trim() && (deeper || !beginsBlock(line))) inner.push(line.slice(Math.min(line.length - line.trimStart().length, indent + 2)));
        else break;
        at += 1;
      }
      const children = blocks(inner, depth + 1);
      const tight = children.length && children[0].tagName === "P" ? [...children[0].childNodes, ...children.slice(1)] : children;
      list.append(element("li", tight));
      while (at < all.length && !all[at].trim() && at + 1 < all.length && pattern.test(all[at + 1])) at += 1;
    }
    return [list, at];
  }

  function table(all, at) {
    const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
    const row = (line, name) => element("tr", cells(line).map((cell) => element(name, inline(cell))));
    const head = element("thead", [row(all[at], "th")]);
    const body = element("tbody");
    at += 2;
    while (at < all.length && all[at].includes("|") && all[at].trim()) {
      body.append(row(all[at], "td"));
      at += 1;
    }
    return [element("div", [element("table", [head, body])], "table"), at];
  }

  /* The nodes of a text, as Markdown up to `most` characters. */
  function render(text, most = MOST_CHARACTERS) {
    const nodes = blocks(text.slice(0, most));
    if (text.length > most) nodes.push(element("pre", [text.slice(most)], "rest"));
    return nodes;
  }

  return { render };
})();
