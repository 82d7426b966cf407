"""What stands between tags in a text that a model wrote."""

from collections.abc import Iterable


def first_block(text: str, tags: Iterable[str]) -> tuple[str, str]:
    """The first of these tags that is closed, and what stands in it; two empty texts where none is.

    Example:
        >>> first_block("<b>1 <a>2</a> <c>3</c>", ("a", "b", "c"))
        ('a', '2')
    """
    blocks = []
    for tag in tags:  # by find: a pattern would look for each tag's end up to the end of the text
        start = text.find(f"<{tag}>")
        begin = start + len(tag) + 2
        if start >= 0 and (end := text.find(f"</{tag}>", begin)) >= 0:
            blocks.append((start, tag, text[begin:end]))
    return min(blocks)[1:] if blocks else ("", "")
