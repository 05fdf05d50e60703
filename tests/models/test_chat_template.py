"""Chat templates under limits: hostile ones end in one line and cost little; the rest renders as in transformers."""

from __future__ import annotations

import time

import pytest

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models import chat_template, template_limits
from jaxmarl_llm.models.chat_template import ChatTemplate

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": " a<b> 'é' "}]
GROW = (
    "{{% set ns = namespace(x={first}) %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
    "{{{{ ns.x }}}}"
)
STEPS, LONG, WIDE = "more than 500000 steps", "a text or list of more than", "width"
HOSTILE = {
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", STEPS),
    "a condition": ("{% for i in range(99999) %}{% for j in range(99999) if 0 %}{% endfor %}{% endfor %}", STEPS),
    "a long text in a loop": ("{% set t %}{% for i in range(9999) %}" + "x" * 9999 + "{% endfor %}{% endset %}", STEPS),
    "repetition": ("{{ 'a' * 3000000000 }}", LONG),
    "repetition of a list": ("{{ [1] * 3000000000 }}", LONG),
    "lists in a list": ("{{ [[1] * 99999] * 99999 }}", STEPS),
    "doubling by ~": (GROW.format(first="'aaaa'", step="ns.x ~ ns.x"), LONG),
    "doubling by +": (GROW.format(first="'aaaa'", step="ns.x + ns.x"), LONG),
    "a tree of one list": (GROW.format(first="[1]", step="[ns.x, ns.x]"), STEPS),
    "a tree of one object": (GROW.format(first="{}", step="{'a': ns.x, 'b': ns.x}"), STEPS),
    "a tree of dict()": (GROW.format(first="{}", step="dict(a=ns.x, b=ns.x)"), STEPS),
    "squares": (GROW.format(first="9", step="ns.x * ns.x"), "an integer of more than 512 bits"),
    "powers": ("{{ 9 ** (9 ** 9) }}", "bits"),
    "a filter's width": ("{{ 'a' | center(3000000000) }}", WIDE),
    "a width through map": ("{{ ['a'] | map('center', 3000000000) | list }}", WIDE),
    "a method's width": ("{{ 'a'.ljust(3000000000) }}", WIDE),
    "a format's width": ("{{ '%3000000000d' % 1 }}", WIDE),
    "a width as an argument": ("{{ '{:{}}'.format(1, 3000000000) }}", WIDE),
    "indentation": ("{{ [[1]] | tojson(indent=3000000000) }}", WIDE),
    "joining": ("{{ ('a' * 200000).join(['b'] * 9999) }}", LONG),
    "replacing": ("{{ ('a' * 200000).replace('a', 'b' * 200000) }}", LONG),
    "search in a loop": (
        "{% set x = 'a' * 200000 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}", STEPS
    ),
    "slices in a loop": ("{% set x = 'a' * 200000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}", STEPS),
    "a macro without end": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "a macro that doubles": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}", STEPS
    ),
    "deep parentheses": ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "cannot be compiled"),
    "deep loops": ("{% for i in messages %}" * 40 + "{% endfor %}" * 40, "cannot be compiled"),
    "a long sum": ("{{" + "x ~ " * 24_000 + "x}}", "more than 20000 nodes"),
    "a long source": ("a" * 300_000, "at most 100000 characters"),
    "division by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "text generator": ("{{ lipsum(n=10000000) }}", "'lipsum' is undefined"),
    "an attribute of Python": ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    "bytes": ("{{ (1).to_bytes(3000000000) }}", "'to_bytes' is not permitted"),
    "change of a message": ("{{ messages[0].update(a=1) }}", "SecurityError"),
    "lines in a message": ("{{ raise_exception('two\nlines') }}", "two lines"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_template_ends_in_one_line(case):
    source, message = HOSTILE[case]
    clock = time.process_time()
    with pytest.raises(ConfigError) as error:
        ChatTemplate(source, "tokenizer T").render(MESSAGES, add_generation_prompt=True)
    assert time.process_time() - clock < 5
    text = str(error.value)
    assert message in text and text.startswith("tokenizer T: ") and "\n" not in text and len(text) < 400


FEATURES = (
    "{% for m in messages %}{{ loop.index0 }}{{ m.role | upper }}{{ m['content'] | trim | tojson }}{{ not loop.last }}"
    "{% endfor %}{{ messages[::-1] | map(attribute='role') | join(',') }}",
    "{% macro f(a, b=2) -%} {{ a ~ b }} {%- endmacro %}{{ f('x') + f(1, 'é') }}{{ messages | length }}",
    "{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% if m.role == 'user' and not ns.found %}"
    "{% set ns.found = true %}{% set ns.n = loop.index %}{% endif %}{% endfor %}{{ ns.n }}{{ ns.found }}",
    "{% generation %}{% set x = 'in' %}{{ x }}{% endgeneration %}{{ x is defined }}{{ bos_token }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content.split('<')[-1].rstrip('> ') }}"
    "{% break %}{% endfor %}{% if tools %}T{% endif %}{{ {'b': 1, 'a': [1.5, none, true]} | tojson(indent=2) }}",
    "{{ ('a,b'.split(',') + ['c']) | reverse | list }}{{ '%s-%d' % ('x', 3) }}{{ '{}:{:>4}'.format('k', 7) }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | first }}{{ 7 // 2 }}{{ 2 ** 5 }}{{ -3 | abs }}",
    "{{ dict(a=1).items() | list }}{{ 'x' in 'xyz' }}{{ messages[5] is undefined }}{{ 'a\nb' | indent(2) }}",
    "{% filter upper %}a{{ bos_token }}{% endfilter %}{% set t %}b{% endset %}{{ t * 3 }}{{ nothing | default('d') }}",
    "{{ range(3) | list }}{{ 'a' if add_generation_prompt else 'b' }}",
)  # fmt: skip


@pytest.mark.parametrize("source", FEATURES)
def test_an_honest_template_renders_as_in_transformers(source):
    from transformers.utils.chat_template_utils import render_jinja_template

    values = {"add_generation_prompt": True, "bos_token": "<s>"}
    expected = render_jinja_template([MESSAGES], chat_template=source, **values)[0][0]
    assert ChatTemplate(source, "T").render(MESSAGES, **values) == expected and expected


def test_a_thousand_turns_take_a_small_part_of_the_budget():
    source = "{% for m in messages %}<|{{ m.role }}|>{{ messages[loop.index0 - 1].content | trim }}\n{% endfor %}"
    template = ChatTemplate(source, "T")
    template.render(MESSAGES * 500)
    assert 1000 < template._env.work < template_limits.MAX_WORK / 10


def test_each_rendering_has_a_budget_of_its_own():
    template = ChatTemplate("{% for i in range(40000) %}{% for j in [1] %}{% endfor %}{% endfor %}", "T")
    for _ in range(3):
        assert template.render(MESSAGES) == ""


def test_the_budget_of_a_value_counts_every_occurrence_of_a_part():
    inner = [1] * 100
    assert template_limits.size([inner] * 50, 10**6) == 1 + 50 * 101
    assert template_limits.size("a" * 160, 10**6) == 11
    assert chat_template.ChatTemplate("{{ 'a' ~ 1 ~ none }}", "T").render([]) == "a1None"
