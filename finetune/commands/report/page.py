"""The page of a report: its style, its frame and its words. A jinja2 template that escapes everything by itself."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from finetune.commands.report.words import WORDS
from finetune.runtime.language import Language

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #16191f; --soft: #5b6472; --line: #e3e6eb; --hair: #eef0f3;
  --s0: #2468b4; --s1: #b8560f; --s2: #1c7c54; --s3: #7d4bb3; --s4: #a83252; --s5: #5d6b1e;
  --good: #1c7c54; --bad: #b3261e; --warn: #8a5a00; --warn-fill: #fff6e0; --bad-fill: #fdeceb; }
@media (prefers-color-scheme: dark) { :root {
  --page: #101318; --card: #181c23; --ink: #e8ebf0; --soft: #9aa4b2; --line: #2a303a; --hair: #222831;
  --s0: #6cabf0; --s1: #f0a060; --s2: #5fcb9b; --s3: #bd94ec; --s4: #f0869f; --s5: #c0cf6a;
  --good: #5fcb9b; --bad: #ff8a80; --warn: #f0c060; --warn-fill: #2b2414; --bad-fill: #331c1c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC",
  sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 48px; }
header { margin-bottom: 28px; }
.brand { color: var(--soft); font-size: 13px; letter-spacing: .04em; margin: 0 0 6px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; letter-spacing: -.01em; }
h1 .state { vertical-align: middle; margin-left: 10px; }
.state { display: inline-block; font-size: 13px; font-weight: 600; line-height: 1; padding: 6px 10px;
  border-radius: 999px; border: 1px solid currentColor; letter-spacing: 0; }
.done, .running { color: var(--good); } .failed, .vanished { color: var(--bad); }
.stopped, .waiting { color: var(--warn); }
.about { color: var(--soft); margin: 8px 0 0; overflow-wrap: anywhere; }
.error { background: var(--bad-fill); color: var(--bad); border-radius: 8px; padding: 10px 14px; margin: 16px 0 0;
  overflow-wrap: anywhere; white-space: pre-wrap; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 0 0 36px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.tile dt { color: var(--soft); font-size: 13px; } .tile dd { margin: 2px 0 0; }
.tile b { font-size: 22px; font-weight: 650; letter-spacing: -.01em; font-variant-numeric: tabular-nums; }
.tile small { display: block; color: var(--soft); font-size: 13px; }
section { margin: 0 0 36px; } h2 { font-size: 18px; margin: 0 0 12px; letter-spacing: -.005em; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 14px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 14px 8px; min-width: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 14px; align-items: baseline; margin-bottom: 6px;
  font-weight: 600; }
figcaption .key { font-weight: 400; font-size: 13px; color: var(--soft); }
.swatch { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px; vertical-align: 4px; }
.area-key .swatch { height: 10px; width: 10px; vertical-align: -1px; }
.note { color: var(--soft); font-size: 13px; margin: 2px 0 4px; }
svg { display: block; width: 100%; height: auto; }
.tick { fill: var(--soft); font: 11px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--hair); stroke-width: 1; } .axis { stroke: var(--line); stroke-width: 1; }
.area ~ .grid { stroke: var(--card); stroke-opacity: .35; }
.resume { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.faint { fill: none; stroke-width: 1; opacity: .28; } .band { stroke: none; opacity: .18; }
.dot { stroke: var(--card); stroke-width: 1.2; } .area { stroke: var(--card); stroke-width: .8; opacity: .85; }
.line.series-0, .faint.series-0 { stroke: var(--s0); } .line.series-1, .faint.series-1 { stroke: var(--s1); }
.line.series-2, .faint.series-2 { stroke: var(--s2); } .line.series-3, .faint.series-3 { stroke: var(--s3); }
.line.series-4, .faint.series-4 { stroke: var(--s4); } .line.series-5, .faint.series-5 { stroke: var(--s5); }
.band.series-0, .dot.series-0, .area.series-0 { fill: var(--s0); }
.band.series-1, .dot.series-1, .area.series-1 { fill: var(--s1); }
.band.series-2, .dot.series-2, .area.series-2 { fill: var(--s2); }
.band.series-3, .dot.series-3, .area.series-3 { fill: var(--s3); }
.band.series-4, .dot.series-4, .area.series-4 { fill: var(--s4); }
.band.series-5, .dot.series-5, .area.series-5 { fill: var(--s5); }
.swatch.series-0 { background: var(--s0); } .swatch.series-1 { background: var(--s1); }
.swatch.series-2 { background: var(--s2); } .swatch.series-3 { background: var(--s3); }
.swatch.series-4 { background: var(--s4); } .swatch.series-5 { background: var(--s5); }
.scroll { background: var(--card); border: 1px solid var(--line); border-radius: 10px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 7px 14px; border-bottom: 1px solid var(--hair); vertical-align: top; }
tr:last-child > * { border-bottom: 0; }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; white-space: nowrap;
  border-bottom-color: var(--line); }
tbody th { font-weight: 500; } td { font-variant-numeric: tabular-nums; }
.number { text-align: right; white-space: nowrap; } .time { white-space: nowrap; color: var(--soft); width: 1%; }
.text { overflow-wrap: anywhere; }
td.text { min-width: 7.5em; } .pairs td.text { min-width: 0; }
.better { color: var(--good); } .worse { color: var(--bad); }
tr.warning td.text { background: var(--warn-fill); } tr.bad td.text { background: var(--bad-fill); color: var(--bad); }
.pairs th { width: 42%; font-weight: 500; color: var(--soft); overflow-wrap: anywhere; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 14px;
  align-items: start; }
details > summary { cursor: pointer; color: var(--soft); margin: 0 0 10px; }
pre { margin: 0; padding: 12px 14px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre b { color: var(--s0); font-weight: 600; }
footer { color: var(--soft); font-size: 13px; border-top: 1px solid var(--line); padding-top: 14px; }
@media (max-width: 560px) { main { padding: 22px 14px 32px; } h1 { font-size: 23px; }
  h1 .state { margin: 8px 0 0; display: table; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 10px; } .tile { padding: 11px 12px; } .tile b { font-size: 19px; }
  th, td { padding: 7px 10px; } .tick { font-size: 14px; } }
@media print { :root { --page: #fff; --card: #fff; } body { font-size: 11px; } main { max-width: none; padding: 0; }
  figure, .tile, tr { break-inside: avoid; } h2 { break-after: avoid; }
  .charts { grid-template-columns: 1fr 1fr; } .tiles { grid-template-columns: repeat(4, 1fr); } }
"""

TEMPLATE = """<!doctype html>
<html lang="{{ words.html_lang }}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src '{{ style_hash }}'; base-uri 'none'; form-action 'none'">
<title>{{ r.name }} – {{ words.title }}</title>
<style>{{ style }}</style>
</head>
<body>
{%- macro pairs(rows) %}
<div class="scroll"><table class="pairs"><tbody>
{%- for name, value in rows %}
<tr><th scope="row">{{ name }}</th><td class="text">{{ value }}</td></tr>
{%- endfor %}
</tbody></table></div>
{%- endmacro %}
{%- macro grid(table) %}
<div class="scroll"><table>
<thead><tr>
{%- for name in table.head %}<th scope="col"{% if loop.index0 in table.numbers %} class="number"{% endif %}>
{{- name }}</th>{% endfor -%}
</tr></thead>
<tbody>
{%- for row in table.rows %}
<tr>
{%- for cell in row %}
<td class="{{ 'number' if loop.index0 in table.numbers else 'text' }} {{ table.mood(loop.index0, cell) }}">
{{- cell }}</td>
{%- endfor %}
</tr>
{%- endfor %}
</tbody></table></div>
{%- endmacro %}
{%- macro moments(list) %}
<div class="scroll"><table><tbody>
{%- for time, text, mood in list %}
<tr class="{{ mood }}"><td class="time">{{ time }}</td><td class="text">{{ text }}</td></tr>
{%- endfor %}
</tbody></table></div>
{%- endmacro %}
{%- macro charts(list) %}
<div class="charts">
{%- for chart in list %}
<figure><figcaption>{{ chart.title }}
{%- for name in chart.keys %}
<span class="key{{ ' area-key' if chart.areas }}">
<span class="swatch series-{{ loop.index0 % 6 }}"></span>{{ name }}</span>
{%- endfor %}</figcaption>
{{ chart.svg }}
{%- if chart.note %}<p class="note">{{ chart.note }}</p>{% endif %}</figure>
{%- endfor %}
</div>
{%- endmacro %}
<main>
<header>
<p class="brand">finetune · {{ words.title }}</p>
<h1>{{ r.name }} <span class="state {{ r.state }}">{{ r.state_text }}</span></h1>
<p class="about">{{ r.about }}</p>
{%- if r.error %}<p class="error">{{ r.error }}</p>{% endif %}
</header>
{%- if r.tiles %}
<dl class="tiles">
{%- for tile in r.tiles %}
<div class="tile"><dt>{{ tile[0] }}</dt>
<dd><b>{{ tile[1] }}</b>{% if tile[2] %}<small>{{ tile[2] }}</small>{% endif %}</dd></div>
{%- endfor %}
</dl>
{%- endif %}
{%- if r.curves %}<section><h2>{{ words.curves }}</h2>{{ charts(r.curves) }}</section>{% endif %}
{%- if r.mix %}<section><h2>{{ words.curriculum }}</h2>{{ charts(r.mix) }}</section>{% endif %}
{%- if r.evaluation.rows %}<section><h2>{{ words.evaluation }}</h2>{{ grid(r.evaluation) }}</section>{% endif %}
{%- if r.plan.rows %}
<section><div class="two"><div><h2>{{ words.plan }}</h2>{{ grid(r.plan) }}</div>
<div><h2>{{ words.rows_planned }}</h2>{{ pairs(r.rows) }}</div></div></section>
{%- endif %}
{%- if r.warnings %}<section><h2>{{ words.warnings }}</h2>{{ moments(r.warnings) }}</section>{% endif %}
{%- if r.starts.rows %}<section><h2>{{ words.starts }}</h2>{{ grid(r.starts) }}</section>{% endif %}
{%- if r.checkpoints.rows %}<section><h2>{{ words.checkpoints }}</h2>{{ grid(r.checkpoints) }}</section>{% endif %}
{%- if r.samples %}<section><h2>{{ words.samples }}</h2><div class="scroll">
{%- for before, after in r.samples %}<pre>{{ before }}<b>{{ after }}</b></pre>{% endfor %}</div></section>{% endif %}
{%- if r.environment or r.config %}
<section><div class="two">
{%- if r.environment %}<div><h2>{{ words.environment }}</h2>{{ pairs(r.environment) }}</div>{% endif %}
{%- if r.config %}<div><h2>{{ words.config }}</h2>{{ pairs(r.config) }}</div>{% endif %}
</div></section>
{%- endif %}
{%- if r.events %}
<section><h2>{{ words.events }}</h2>
<details><summary>{{ r.events | length }}</summary>{{ moments(r.events) }}</details></section>
{%- endif %}
<footer>{{ r.footer }}</footer>
</main>
</body>
</html>
"""


def render_page(facts: Mapping[str, Any], language: Language) -> str:
    """The page. Strings in `facts` are text, whatever they hold; only what is made as markup goes in as it is."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    return environment.from_string(TEMPLATE).render(
        r=facts, words=WORDS[language], style=Markup(STYLE), style_hash=Markup(f"sha256-{digest}")
    )
