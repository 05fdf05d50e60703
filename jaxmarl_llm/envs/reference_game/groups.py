"""Groups of articles of one field: the titles that a listener chooses from, and how a choice is read.

Articles of a split are parted into groups of equal size, each of articles that share rare words (BM25). Every article
of a group is the wanted one in one task. All tasks of a group show the same titles in the same order. So a listener
that ignores the hint is right in one task of each group at most, whatever its rule. Titles that lie between the
others, long titles and places of a list then say nothing.

Groups and their order depend on the content of the articles alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jaxmarl_llm.envs import bm25
from jaxmarl_llm.envs.scitldr import Article, digest, opening

RARE = 20  # a word of more than one in RARE articles names no field
FEWEST = 3  # articles that may have a rare word, however few articles there are


def parted(articles: Sequence[Article], size: int, title_words: int) -> list[list[Article]]:
    """Groups of ``size`` articles whose titles begin differently; articles that are left over are in none.

    Args:
        articles: Of one split, in any order.
        size: Articles of a group.
        title_words: First words of a title that are shown.
    """
    found = sorted(articles, key=lambda article: digest(article["text"]))
    titles = [bm25.words(opening(article["title"], title_words)) for article in found]
    passages = _rare([bm25.words(f"{article['title']} {article['text']}") for article in found])
    counted, free, groups = bm25.index(passages), set(range(len(found))), []
    for i in range(len(found)):
        if i not in free:
            continue
        scores, members = bm25.bm25(passages[i], counted), [i]
        for j in sorted(free - {i}, key=lambda j: (-scores[j], j)):
            if not any(_clash(titles[j], titles[member]) for member in members):
                members.append(j)
            if len(members) == size:
                groups.append([found[k] for k in sorted(members, key=lambda k: digest(f"order {found[k]['text']}"))])
                free -= set(members)
                break
    return groups


def _rare(bags: Sequence[Sequence[str]]) -> list[str]:
    """The rare words of each article, each word once."""
    shared = Counter(word for bag in bags for word in set(bag))
    most = max(FEWEST, len(bags) // RARE)
    return [" ".join(sorted(word for word in set(bag) if shared[word] <= most)) for bag in bags]


def _clash(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether a title is the beginning of the other one, so that no answer tells them apart."""
    size = min(len(one), len(other))
    return one[:size] == other[:size]


def named(answer: str, titles: Sequence[str], truncated: bool = False) -> int | None:
    """Place of the title that an answer names; None where it names none, or several.

    An answer names a title whose first words it repeats. Case, punctuation and spacing do not count. Nothing may stand
    before or behind these words.

    Args:
        answer: The text of a listener.
        titles: The titles as they were shown.
        truncated: Whether the length limit ended the answer. Its last word may then be the beginning of a word.
    """
    said = bm25.words(answer)
    fits = [i for i, title in enumerate(titles) if said and _begins(said, bm25.words(title), truncated)]
    return fits[0] if len(fits) == 1 else None


def _begins(said: Sequence[str], title: Sequence[str], truncated: bool) -> bool:
    """Whether a title begins with the words ``said``."""
    if len(said) > len(title) or said[:-1] != title[: len(said) - 1]:
        return False
    word = title[len(said) - 1]
    return word.startswith(said[-1]) if truncated else word == said[-1]


def first_words(titles: Sequence[str], place: int, least: int) -> str:
    """The first words of a title that tell it apart, ``least`` of them at least where it has so many.

    Args:
        titles: The titles as they were shown.
        place: Of the title.
        least: Words.
    """
    size = least
    while named(opening(titles[place], size), titles) != place:
        size += 1
    return opening(titles[place], size)
