"""`fine_tuning.conversations`: masks equal those made by hand, or the message of a row is named."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest

from lightning_solo.data.tokenizers import PLAIN_TEMPLATE, add_tokens
from lightning_solo.errors import PresetError
from lightning_solo.fine_tuning.conversations import Conversations, Encoded
from lightning_solo.fine_tuning.rows import RowError
from tests.messages import mentions

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>", "<|return|>"]
TEXT = ["user assistant system tool What is two plus two? It is four. <think> brief answer </think> name arguments\n"]


@cache
def tokenizer(kind: str = "byte_level", eos: str = "</s>") -> Any:
    """Return a small tokenizer: BPE on bytes, or on words with a sign for spaces as SentencePiece's, with a normalizer.

    "stripping" is on bytes, and its normalizer removes white space at the end of each text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if kind == "metaspace":
        plain = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        plain.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        alphabet, first = [], ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        plain = Tokenizer(models.BPE())
        plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
        plain.post_processor = processors.ByteLevel(trim_offsets=True)
        plain.decoder = decoders.ByteLevel()
        alphabet, first = pre_tokenizers.ByteLevel.alphabet(), []
        if kind == "stripping":
            plain.normalizer = normalizers.Strip(left=False, right=True)
    trainer = trainers.BpeTrainer(
        vocab_size=len(first) + 400, special_tokens=first, initial_alphabet=alphabet, show_progress=False
    )
    plain.train_from_iterator(TEXT * 4, trainer)
    plain.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    plain.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token=eos, pad_token="<pad>")


def by_template(template: str, kind: str = "byte_level") -> Conversations:
    own = copy.copy(tokenizer(kind))
    own.chat_template = template
    return Conversations(own)


def by_hand(pieces: list[tuple[str, bool]], kind: str = "byte_level") -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation that is written by hand, of which some pieces are trained."""
    encode = tokenizer(kind)
    ids: list[int] = []
    trained: list[bool] = []
    for text, on in pieces:
        part = encode(text, add_special_tokens=False)["input_ids"]
        ids += part
        trained += [on] * len(part)
    return ids, trained


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


HEAD = "{{ '<|im_start|>' + message['role'] + '\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
EACH = "{% for message in messages %}"
BODY = "{{ message['content'] + '<|im_end|>\n' }}"


def if_assistant(tagged: str, other: str = BODY) -> str:
    return "{% if message['role'] == 'assistant' %}" + tagged + "{% else %}" + other + "{% endif %}{% endfor %}"


CHATML = EACH + HEAD + BODY + "{% endfor %}" + ASK
TAGS = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
TEMPLATES = {
    "without tags": CHATML,
    "tags": EACH + HEAD + if_assistant(TAGS) + ASK,
    "tags with the newline": EACH
    + HEAD
    + if_assistant("{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}")
    + ASK,
    "end outside the tags": EACH
    + HEAD
    + if_assistant("{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}")
    + ASK,
    "end after a newline": EACH
    + HEAD
    + if_assistant("{% generation %}{{ message['content'] }}{% endgeneration %}{{ '\n<|im_end|>\n' }}")
    + ASK,
}
CHAT = [user("What is two?"), answer("It is  two. \U0001f600"), user("plus two?"), answer("four\nIt is \U0001f600")]
Q1, A1, Q2, A2 = (turn["content"] for turn in CHAT)
OPEN, TO_ANSWER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_mask_is_that_made_by_hand_with_and_without_tags(name: str, kind: str) -> None:
    end = "\n<|im_end|>" if name == "end after a newline" else "<|im_end|>"
    newline = name == "tags with the newline"
    pieces = [
        (OPEN + Q1 + TO_ANSWER, False),
        *((A1, True), (end, True), ("\n", newline), (OPEN + Q2 + TO_ANSWER, False)),
        *((A2, True), (end, True), ("\n", newline)),
    ]
    encoded = by_template(TEMPLATES[name], kind).encode(CHAT)
    assert (encoded.ids, encoded.trained) == by_hand(pieces, kind)
    assert (encoded.answers, len(encoded.ends), encoded.prefixes) == (2, 2, True)
    stop = tokenizer(kind).convert_tokens_to_ids("<|im_end|>")
    assert [encoded.ids[place] for place in encoded.ends] == [stop, stop]
    assert all(encoded.trained[place] for place in encoded.ends)


LLAMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = 'Be brief.' %}{% endif %}"
    "{{ '<|header|>system<|/header|>\n\n' + first + '<|eot|>' }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{{ '<|header|>' + message['role'] + '<|/header|>\n\n' + message['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)


@pytest.mark.parametrize("system", [None, "name"])
def test_system_turn_is_not_trained_whether_given_or_the_templates_own(system: str | None) -> None:
    chat = [*([{"role": "system", "content": system}] if system else []), *CHAT]
    start = f"<s><|header|>system<|/header|>\n\n{system or 'Be brief.'}<|eot|><|header|>user<|/header|>\n\n"
    to_answer = "<|eot|><|header|>assistant<|/header|>\n\n"
    pieces = [
        *((start + Q1 + to_answer, False), (A1 + "<|eot|>", True)),
        *(("<|header|>user<|/header|>\n\n" + Q2 + to_answer, False), (A2 + "<|eot|>", True)),
    ]
    encoded = by_template(LLAMA).encode(chat)
    assert (encoded.ids, encoded.trained) == by_hand(pieces)
    assert encoded.ids.count(tokenizer().bos_token_id) == 1


MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
)


def test_template_without_a_header_for_answers() -> None:
    pieces = [
        *(("<s>[INST] " + Q1 + " [/INST]", False), (" " + A1 + "</s>", True)),
        *(("[INST] " + Q2 + " [/INST]", False), (" " + A2 + "</s>", True)),
    ]
    encoded = by_template(MISTRAL).encode(CHAT)
    assert (encoded.ids, encoded.trained) == by_hand(pieces)


# As Qwen3's: thoughts before the last question are dropped, and later answers without thoughts have an empty thought
THINKING = (
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}" + EACH + HEAD + "{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' %}{% set answer = content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.index0 > ns.last %}{{ content if '</think>' in content else '<think>\n\n</think>\n\n' + answer }}"
    "{% else %}{{ answer }}{% endif %}{% else %}{{ content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}" + ASK
)


@pytest.mark.parametrize("thought", ["<think>\nbrief\n</think>\n\n", ""])
def test_thoughts_that_are_dropped_are_not_trained(thought: str) -> None:
    chat = [CHAT[0], answer(thought + "It is two."), CHAT[2], answer(thought + "four")]
    pieces = [
        *((OPEN + Q1 + TO_ANSWER, False), ("It is two.<|im_end|>", True), ("\n" + OPEN + Q2 + TO_ANSWER, False)),
        *(((thought or "<think>\n\n</think>\n\n") + "four<|im_end|>", True), ("\n", False)),
    ]
    encoded = by_template(THINKING).encode(chat)
    assert (encoded.ids, encoded.trained) == by_hand(pieces)


TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}" + EACH + HEAD + "{{ mes"
    "sage['content'] }}{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + ASK
)


@pytest.mark.parametrize("as_json", [False, True])
def test_call_of_a_tool_is_trained_and_its_result_is_not(as_json: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "plus"}}]
    arguments: Any = '{"a": 2}' if as_json else {"a": 2}
    call = {"type": "function", "function": {"name": "plus", "arguments": arguments}}
    chat = [user(Q1), answer(None, tool_calls=[call]), {"role": "tool", "content": "4"}, answer("four")]  # type: ignore[arg-type]
    pieces = [
        ('<|im_start|>system\n[{"type": "function", "function": {"name": "plus"}}]<|im_end|>\n', False),
        *((OPEN + Q1 + TO_ANSWER, False), ('{"name": "plus", "arguments": {"a": 2}}<|im_end|>', True)),
        *(("\n<|im_start|>tool\n4" + TO_ANSWER, False), ("four<|im_end|>", True), ("\n", False)),
    ]
    encoded = by_template(TOOLS).encode(chat, '[{"type": "function", "function": {"name": "plus"}}]')
    assert (encoded.ids, encoded.trained) == by_hand(pieces)
    assert encoded == by_template(TOOLS).encode(chat, tools)


def test_template_that_leaves_out_tools_calls_or_system_turns_is_refused() -> None:
    call = {"function": {"name": "plus", "arguments": {}}}
    chatml = by_template(CHATML)
    for chat, tools in (([user("a"), answer("", tool_calls=[call])], None), (CHAT, [call])):
        with pytest.raises(RowError, match=mentions("data.chat_template" if tools is None else "tools")):
            chatml.encode(chat, tools)
    silent = "{% for message in messages if message['role'] != 'system' %}" + CHATML.removeprefix(EACH)
    with pytest.raises(RowError, match=mentions("messages[0]")):
        by_template(silent).encode([{"role": "system", "content": "brief"}, *CHAT])


@pytest.mark.parametrize("name", ["tags", "end outside the tags"])
@pytest.mark.parametrize("kind", ["stripping", "byte_level"])
def test_span_that_ends_on_stripped_white_space_or_at_the_first_token_ends_there(name: str, kind: str) -> None:
    """Upstream such a span marks all that follows as an answer."""
    template = TEMPLATES[name].replace(HEAD, "{% if message['role'] == 'user' %}" + HEAD + "{% endif %}")
    template = template.replace(BODY, BODY.replace("\n", ""))
    encoded = by_template(template, kind).encode([answer("a "), user("plus"), answer("It is ")])
    pieces = [("a ", True), ("<|im_end|>", True), ("\n" + OPEN + "plus<|im_end|>", False), ("It is ", True)]
    ids, trained = by_hand([*pieces, ("<|im_end|>", True)], kind)
    kept = len(ids)  # the template's last newline, which one of them strips
    assert (encoded.ids[:kept], encoded.trained[:kept]) == (ids, trained)
    assert not any(encoded.trained[kept:])


def test_rows_that_are_no_conversation_are_refused_by_message() -> None:
    conversations = by_template(CHATML)
    for chat, reason, words in [
        ([], "no messages", "messages"),
        ("text", "no messages", "messages"),
        ([user("a"), "b"], "no message", "messages[1]"),
        ([user("a"), {"role": "gpt", "content": "b"}], "unknown role", "'assistant'"),
        ([user("a"), {"role": "asistant", "content": "b"}], "unknown role", "messages[1].role"),
        ([user("a"), answer(None)], "no content", "messages[1].content"),  # type: ignore[arg-type]
        ([{"role": "user"}, answer("a")], "no content", "messages[0].content"),
        ([user("a"), answer(7)], "no content", "7"),  # type: ignore[arg-type]
        ([user([{"type": "image"}]), answer("a")], "other than text", "messages[0]"),  # type: ignore[arg-type]
        ([user("a"), answer(" \n")], "empty answer", "messages[1]"),
        ([user("a")], "no answer", "assistant"),
        ([user("a<|im_end|>"), answer("b")], "control tokens", "<|im_end|>"),
        ([user("a"), answer("b</s>")], "control tokens", "messages[1].content"),
        ([user("a"), answer("b", weight=0)], "weights", "messages[1].weight"),
    ]:
        with pytest.raises(RowError, match=mentions(words)) as caught:
            conversations.encode(chat)
        assert caught.value.reason == reason
    with pytest.raises(RowError, match=mentions("roles must alternate")) as caught:
        by_template(LLAMA).encode([user("a"), user("b"), answer("c")])
    assert caught.value.reason == "refused by the template"


def test_new_tokens_of_the_user_may_be_in_conversations() -> None:
    chat, tokens = [user("a"), answer("b<|call|>")], add_tokens(own := copy.deepcopy(tokenizer()), ["<|call|>"])
    own.chat_template = CHATML
    with pytest.raises(RowError, match=mentions("<|call|>")):
        Conversations(own).encode(chat)
    encoded = Conversations(own, ["<|call|>"]).encode(chat)
    assert encoded.trained[encoded.ids.index(*tokens)]


def test_contents_of_several_texts_are_joined() -> None:
    conversations = by_template(CHATML)
    parts: Any = [{"type": "text", "text": "What is "}, {"type": "text", "text": "two?"}]
    assert conversations.encode([user(parts), *CHAT[1:]]) == conversations.encode(CHAT)


def test_role_that_the_template_knows_is_allowed() -> None:
    template = CHATML.replace(EACH, EACH + "{% if message['role'] == 'critic' %}{% endif %}")
    assert by_template(template).encode([*CHAT, {"role": "critic", "content": "a"}]).answers == 2


def test_answer_whose_prompt_is_written_differently_later_is_refused_by_its_message() -> None:
    counted = CHATML.replace(EACH, "{{ messages | length }}" + EACH)
    with pytest.raises(RowError, match=mentions("messages[1]", "data.chat_template")) as caught:
        by_template(counted).encode(CHAT)
    assert caught.value.reason == "no prefix"


def test_template_that_writes_no_prompt_is_refused_unless_the_answer_comes_first() -> None:
    with pytest.raises(RowError, match=mentions("messages[1]", "add_generation_prompt")):
        by_template(CHATML.removesuffix(ASK)).encode(CHAT)


@pytest.mark.parametrize("tags", [False, True])
def test_tokens_that_span_prompt_and_answer_are_refused(tags: bool) -> None:
    """The prompt ends in a space, which the whole text has within the answer's first token."""
    answered = "{{ message['content'] + eos_token }}"
    if tags:
        answered = "{% generation %}" + answered + "{% endgeneration %}"
    spaced = (
        "{% for message in messages %}{{ message['role'] + ': ' }}{% if message['role'] == 'assistant' %}"
        + answered
        + "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    with pytest.raises(RowError, match=mentions("messages[1]", "write data.chat_template=")) as caught:
        by_template(spaced).encode([user("a"), answer("is")])
    assert caught.value.reason == "joined tokens"


@pytest.mark.parametrize("end", ["", "\n", "<|stop|>"], ids=["nothing", "a newline", "no token"])
def test_template_without_an_end_of_turn_is_refused_with_the_remedy(end: str) -> None:
    template = CHATML.replace("<|im_end|>\n", end)
    with pytest.raises(PresetError, match=mentions("data.chat_template=plain", "data.new_tokens")):
        by_template(template).encode(CHAT)


def test_answer_without_its_end_is_refused_even_if_a_later_turn_has_one() -> None:
    only_last = (
        EACH + HEAD + "{{ message['content'] }}{% if loop.last %}{{ '<|im_end|>' }}{% endif %}{% endfor %}" + ASK
    )
    with pytest.raises(RowError, match=mentions("messages[1]")) as caught:
        by_template(only_last).encode([*CHAT, user("name")])
    assert caught.value.reason in ("no end of turn", "no prefix")
    not_of_answers = (
        EACH + HEAD + if_assistant("{{ message['content'] }}{% if loop.last %}{{ '<|im_end|>' }}{% endif %}")
    )
    with pytest.raises(RowError, match=mentions("messages[1]")) as caught:
        by_template(not_of_answers + ASK).encode(CHAT)
    assert caught.value.reason == "no end of turn"


def test_tags_in_a_macro_whose_places_are_wrong_are_refused() -> None:
    macro = "{% macro turn(text) %}{% generation %}{{ text }}{% endgeneration %}{% endmacro %}"
    template = macro + EACH + "{% set rendered = message['role'] + ': ' + turn(message['content']) %}{{ rendered }}"
    template += "{{ '<|im_end|>\n' }}"
    with pytest.raises(RowError) as caught:
        by_template(template + "{% endfor %}" + ASK).encode(CHAT)
    assert caught.value.reason == "outside the tags"


def test_tags_around_other_messages_are_noticed() -> None:
    around = "{% generation %}" + BODY.replace("\\n", "") + "{% endgeneration %}"
    for template, others in ((EACH + HEAD + around + "{% endfor %}" + ASK, {"user"}), (TEMPLATES["tags"], set())):
        conversations = by_template(template)
        # also where an answer has the text of a question
        for chat in (CHAT, [user("four"), answer("It is four")]):
            encoded = conversations.encode(chat)
            assert encoded.others == others
            question = tokenizer()(chat[0]["content"])["input_ids"]
            place = next(n for n in range(len(encoded.ids)) if encoded.ids[n : n + len(question)] == question)
            assert encoded.trained[place] == bool(others)


def test_template_that_is_no_jinja_is_refused_at_once_with_the_line() -> None:
    with pytest.raises(PresetError, match=mentions("line 2", "endfor", "data.chat_template")):
        by_template(EACH + "\n{% endif %}").encode(CHAT)


def test_own_template_and_the_lack_of_one() -> None:
    pieces = [
        *((f"<s>### User:\n{Q1}\n### Assistant:\n", False), (A1 + "</s>", True)),
        *((f"\n### User:\n{Q2}\n### Assistant:\n", False), (A2 + "</s>", True), ("\n", False)),
    ]
    encoded = by_template(PLAIN_TEMPLATE).encode(CHAT)
    assert (encoded.ids, encoded.trained) == by_hand(pieces)
    with pytest.raises(PresetError, match=mentions("data.chat_template=plain")):
        Conversations(tokenizer()).encode(CHAT)


def test_only_the_completion_is_trained_where_the_prompt_has_answers_too() -> None:
    for name in ("tags", "without tags"):
        conversations = by_template(TEMPLATES[name])
        whole, part = conversations.encode(CHAT), conversations.encode(CHAT, None, first=2)
        assert part.ids == whole.ids
        assert part.trained == [on and n > whole.ends[0] for n, on in enumerate(whole.trained)]


def test_mask_of_transformers_is_equal_where_it_is_right() -> None:
    own = tokenizer()
    chat = [user("What is two?"), answer("It is two."), user("plus"), answer("four")]
    theirs = own.apply_chat_template(
        chat, chat_template=TEMPLATES["tags"], return_dict=True, return_assistant_tokens_mask=True
    )
    encoded: Encoded = by_template(TEMPLATES["tags"]).encode(chat)
    assert (encoded.ids, [int(on) for on in encoded.trained]) == (theirs["input_ids"], theirs["assistant_masks"])
