"""`in_english`: what a Chinese response says of options, in the English words by which options are judged."""

from __future__ import annotations

import re

_IDEOGRAPH = r"[\u3400-\u9fff]"
_ITEM = r"(?<=[A-Z])\s*[)\]]?\s*(?:选?项)?"
_NEXT_OPTION = r"\s*:?\s*(?=[(\[]?\s?[A-Z](?![A-Za-z]))"
#: What Chinese responses say of options, in English, in order; other words stay as they are and decide nothing.
_CHINESE = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"。", ". "),
        (r"[,;](?=\S)", ", "),
        (r"(?:等等|等一下|不对)(?=[,.:! ])", " wait "),
        (r"答案】?\s*(?:并|肯定|绝对)?(?:不是|不为|不选|不可能是|不会是)", " the answer is not "),
        (r"答案】?\s*(?:可能|也许|或许)(?:是|为|选)", " the answer could be "),
        (r"【?(?:正确|最终|最后|最佳|标准)?答案】?\s*(?:应该?|显然|就)?(?:是|为|选择?)?(?=\s*:|" + _NEXT_OPTION + ")", " the answer is "),
        (r"(?<!不)(?<!不完全)(?<!不太)(?<!不够)(?<!非)(?<!未必)(?<!最不)正确的?(?:一项|一个)?(?:应该?|显然|就)?(?:是|为)" + _NEXT_OPTION, " the answer is "),
        (r"(?:不能|不应该?|不可|不|别)选(?:择|项)?" + _NEXT_OPTION + r"|(?:排除|剔除)(?:掉|了|选项)*" + _NEXT_OPTION, " reject "),
        (r"而?(?:并)?(?:不是|而非|并非)" + _NEXT_OPTION, " not "),
        (r"(?:如果|假如|假设|若)", " if "),
        (r"(?:因此|所以|故|综上所述|综上|于是|从而)", " so "),
        (r"(?:正确(?:的)?)?选项(?:应该?)?(?:是|为)" + _NEXT_OPTION, " the correct option is "),
        (r"选(?:择|项)?" + _NEXT_OPTION, " choose "),
        (_ITEM + r"\s*(?:或者?|还是|/)\s*(?=[(\[]?[A-Z])", " or "),
        (_ITEM + r"\s*(?:和|与|及|以及|跟)\s*(?=[(\[]?[A-Z])", " and "),
        (_ITEM + r"(?:显然|明显|也|都|均|就|才)*(?:并)?(?:不是|不为)(?:正确)?(?:的)?(?:答案|选项)", " is not the answer "),
        (_ITEM + r"(?:显然|明显|也|都|均|就|才)*(?:是)?(?:不正确|不对|错误|错|不成立|不符合|不可能|不选|被?排除)的?", " is wrong "),
        (_ITEM + r"(?:显然|明显|就|才|最)*(?:是|为)?(?:唯一)?(?:正确|对|符合(?:题意|要求|条件))的?(?:答案|选项)?(?=[\s,.;!]|$)", " is correct "),
        (_ITEM + r"(?:就|才)?(?:是|为)(?:正确)?的?(?:答案|选项)", " is the answer "),
        (rf"(?<={_IDEOGRAPH})(?=[(\[]?[A-Z])|(?<=[A-Z)\]])(?={_IDEOGRAPH})", " "),
    )
)  # fmt: skip


def in_english(text: str) -> str:
    """Return a response in plain writing with English in place of the Chinese words that give, reject, join or correct options.

    Other words stay as they are and decide nothing. A text without Chinese is returned as it is.
    """
    if re.search(_IDEOGRAPH, text):
        for pattern, replacement in _CHINESE:
            text = pattern.sub(replacement, text)
    return text
