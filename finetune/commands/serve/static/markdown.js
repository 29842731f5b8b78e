"use strict";
/* Markdown -> DOM nodes. Text only ever becomes text nodes: no HTML is parsed, no address is fetched, and a link is a
   link only if it begins with http://, https:// or mailto:. Images are shown as links. */

const Markdown = (() => {
  const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
  const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
  const RULE = /^ {0,3}([-*_])\s*(\1\s*){2,}$/;
  const BULLET = /^(\s*)([-*+])\s+(.*)$/;
  const NUMBER = /^(\s*)(\d{1,9})[.)]\s+(.*)$/;
  const QUOTE = /^ {0,3}> ?(.*)$/;
  const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
  const SAFE_LINK = /^(https?:\/\/|mailto:)[^\s]+$/i;
  const MOST_DEPTH = 12;

  function element(name, children = [], className = "") {
    const node = document.createElement(name);
    if (className) node.className = className;
    node.append(...children);
    return node;
  }

  /* ---------- inside a line ---------- */

  /* The first construct at or after the beginning that matches wins; what is before it is plain text. */
  const INLINE = [
    { at: /(`+)([\s\S]*?[^`])\1(?!`)/, make: (m) => element("code", [m[2].replace(/^ (.*) $/s, "$1")]) },
    { at: /\\([\\`*_{}[\]()#+\-.!|~>])/, make: (m) => document.createTextNode(m[1]) },
    { at: /!?\[([^\]\n]{1,500})\]\(\s*<?([^\s<>)]{1,2000})>?(?:\s+["'][^"'\n]*["'])?\s*\)/, make: link },
    { at: /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/, make: (m) => anchor(m[1], [m[1]]) },
    { at: /https?:\/\/[^\s<>"'`）】」』，。；：！？]{1,2000}/, make: bareLink },
    { at: /\*\*(?=\S)([\s\S]{0,2000}?\S)\*\*/, make: (m, depth) => element("strong", inline(m[1], depth)) },
    { at: /~~(?=\S)([\s\S]{0,2000}?\S)~~/, make: (m, depth) => element("del", inline(m[1], depth)) },
    { at: /\*(?=[^\s*])([^*\n]{0,2000}?[^\s*])\*(?!\*)/, make: (m, depth) => element("em", inline(m[1], depth)) },
    { at: /(?<![\p{L}\p{N}_])_(?=[^\s_])([^_\n]{0,2000}?[^\s_])_(?![\p{L}\p{N}_])/u, make: (m, depth) => element("em", inline(m[1], depth)) },
  ];

  function inline(text, depth = 0) {
    if (depth > MOST_DEPTH) return [text];
    const nodes = [];
    let rest = text;
    while (rest) {
      let best = null;
      for (const rule of INLINE) {
        const match = rule.at.exec(rest);
        if (match && (!best || match.index < best.match.index)) best = { rule, match };
        if (best && best.match.index === 0) break;
      }
      if (!best) break;
      if (best.match.index) nodes.push(rest.slice(0, best.match.index));
      const made = best.rule.make(best.match, depth + 1);
      nodes.push(made.node || made);
      rest = rest.slice(best.match.index + (made.length ?? best.match[0].length));
    }
    if (rest) nodes.push(rest);
    return nodes;
  }

  function link(match, depth) {
    return SAFE_LINK.test(match[2]) ? anchor(match[2], inline(match[1], depth)) : element("span", [match[0]]);
  }

  function bareLink(match) {
    const address = match[0].replace(/[.,;:!?)\]}*_~]+$/, "");
    return { node: anchor(address, [address]), length: address.length };
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
    const all = Array.isArray(source) ? source : source.replace(/\r\n?/g, "\n").split("\n");
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
        nodes.push(element("h" + Math.min(6, match[1].length + 2), inline(match[2])));
        at += 1;
      } else if (RULE.test(line)) {
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
      } else if (line.includes("|") && at + 1 < all.length && all[at + 1].includes("-") && TABLE_LINE.test(all[at + 1])) {
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

  function beginsBlock(line) {
    return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || BULLET.test(line) || NUMBER.test(line);
  }

  function fenced(all, at, match) {
    const [, fence, language] = match;
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

  return { render: (text) => blocks(String(text)) };
})();
