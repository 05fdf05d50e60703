"""Hostile chat templates: snippets that loop, grow, nest or reach for what they must not, combined at random."""

from __future__ import annotations

import random

PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# N stands for a number, X for an expression, B for a block of the template.
EXPRESSIONS = (
    "'a' * N", "[1] * N", "[[1] * 9] * N", "N ** N", "N * N", "1 / 0", "'%Nd' % 1", "'%*d' % (N, 1)", "'%s%s' % (X, X)",
    "'{:Nd}'.format(1)", "'{:{}}'.format(1, N)", "'{0}{0}{0}'.format(X)", "'a' | center(N)", "'a'.ljust(N)",
    "'a'.zfill(N)", "'a\n\n\n' | indent(N)", "[X, X] | tojson(indent=N)", "'a'.encode().ljust(N)", "(1).to_bytes(N)",
    "range(N) | list", "range(N) | join('ab')", "('ab' * 99).replace('a', X | string)",
    "'ab' | replace('', X | string)",
    "(X | string).join(['a', 'b', 'c'])", "X ~ X ~ X", "X + X", "[X, X, X]", "{'a': X, 'b': X}", "dict(a=X, b=X)",
    "namespace(x=X)", "lipsum(n=N)", "cycler(X, X).next()", "X is eq(X)", "X in X", "X == X", "[X, X] | sort",
    "[X, X] | unique | list", "[[1], [X]] | sum(start=[])", "[X] | map('upper') | list",
    "['a'] | map('center', N) | list",
    "[X] | batch(N, 'x') | list", "X | slice(N) | list", "1.5 | round(N, 'floor')", "X | wordwrap(N)", "X | urlize",
    "X | xmlattr", "X | pprint", "X | random", "X | filesizeformat", "X | striptags", "''.__class__.__mro__",
    "self._TemplateReference__context", "messages.append(X)", "messages[0].update(a=X)", "raise_exception(X)",
    "raise_exception('two\nlines')", "strftime_now('%NY')", "f(X)", "caller()", "loop.index", "ns.x", "x",
    "nothing.at.all",
    "messages", "messages[N]", "messages[::-1]", "messages | tojson", "'9' * 5000 | int", "bos_token", "-X", "not X",
    "X | float", "X | int", "X if X else X", "X | truncate(N)", "X | dictsort", "X | groupby('a') | list",
    "X | default(X)",
    "X | attr('format')", "('{0.' ~ '__class__}').format(1)", "'a'.expandtabs(N)", "'a'.translate({97: X})",
    "X.items()",
)  # fmt: skip
BLOCKS = (
    "{{ X }}", "{% for i in range(N) %}B{% endfor %}", "{% for i in X %}B{% endfor %}",
    "{% for i in range(N) %}{% for j in range(N) %}B{% endfor %}{% endfor %}",
    "{% for i in range(N) if X %}B{% endfor %}", "{% set x = X %}B", "{% set ns = namespace(x=X) %}B",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(N) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}B",
    "{% set ns = namespace(x=[1]) %}{% for i in range(N) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}B",
    "{% set ns = namespace(x=[1]) %}{% for i in range(N) %}{% set ns.x = ns.x + ns.x %}{% endfor %}B",
    "{% set ns = namespace(x={}) %}{% for i in range(N) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}"
    "{% endfor %}B{{ ns.x }}",
    "{% set ns = namespace(x=9) %}{% for i in range(N) %}{% set ns.x = ns.x * ns.x %}{% endfor %}B",
    "{% macro f(n) %}B{{ f(n) }}{% endmacro %}{{ f(N) }}",
    "{% macro f(n) %}aB{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(N) }}",
    "{% for x in [[X]] recursive %}B{{ loop(x) }}{% endfor %}", "{% block a %}B{{ self.a() }}{% endblock %}",
    "{% filter center(N) %}B{% endfilter %}", "{% set x %}B{% endset %}", "{% call f(X) %}B{% endcall %}",
    "{% include 'x' %}", "{% extends 'x' %}", "{% import 'x' as y %}", "{% generation %}B{% endgeneration %}",
    "{% if X %}B{% else %}B{% endif %}", "{% for i in range(N) %}{% continue %}B{% endfor %}",
    "{% raw %}{{ B }}{% endraw %}",
    "text ", "{{", "{% endfor %}", "{% for", "\ud800", "\x00",
)  # fmt: skip
NUMBERS = ("0", "1", "-1", "3", "40", "60", "1000", "99999", "100000", "1000000000", "3000000000", "9" * 5000, "1e308")


def expression(rng: random.Random, depth: int) -> str:
    """Draw an expression."""
    if depth <= 0:
        return rng.choice(("1", "'a'", "x", "messages", "'a' * 200000", "[1] * 100000", "range(100000)", "none"))
    out = rng.choice(EXPRESSIONS)
    while "X" in out:
        out = out.replace("X", f"({expression(rng, depth - 1)})", 1)
    return filled(rng, out)


def block(rng: random.Random, depth: int) -> str:
    """Draw a part of a template."""
    out = rng.choice(BLOCKS) if depth > 0 else "{{ X }}"
    parts = out.split("B")
    out = parts[0] + "".join(block(rng, depth - 1) + part for part in parts[1:])
    while "X" in out:
        out = out.replace("X", expression(rng, rng.choice((0, 1, 1, 2))), 1)
    return filled(rng, out)


def filled(rng: random.Random, text: str) -> str:
    """Replace every place of a number."""
    while "N" in text:
        text = text.replace("N", rng.choice(NUMBERS), 1)
    return text


def template(rng: random.Random) -> tuple[str, str]:
    """Draw a template: hostile parts around or inside a plain one, a damaged plain one, or a nested or long one."""
    kind = rng.choice(("hostile", "hostile", "hostile", "beside", "inside", "damaged", "nested"))
    if kind == "nested":
        first, last, depth = rng.choice((("(", ")", 5000), ("[", "]", 5000), ("-", "", 20_000), ("{'a':", "}", 3000)))
        return kind, rng.choice(("{{" + first * depth + "1" + last * depth + "}}", "{% if 1 %}" * 3000, "a" * 300_000))
    if kind == "damaged":
        text = PLAIN
        for _ in range(rng.choice((1, 2, 4))):
            place, size = rng.randrange(len(text)), rng.choice((0, 1, 5, 20))
            text = text[:place] + rng.choice(("", "{{ X }}", "}", "%", "messages", "\x00", "'")) + text[place + size :]
        return kind, filled(rng, text.replace("X", "messages"))
    part = block(rng, rng.choice((1, 2, 3)))
    if kind == "beside":
        return kind, rng.choice((part + PLAIN, PLAIN + part))
    if kind == "inside":
        return kind, PLAIN.replace("{% endfor %}", part + "{% endfor %}")
    return kind, part
