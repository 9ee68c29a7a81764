"""The names that a configuration may turn into objects.

A node of a configuration becomes an object by the ``name`` of a technique or of a class below, or by
``_target_: some.path`` if the user allowed a prefix of that path. Everything else is refused.
"""

from __future__ import annotations

from lightning_solo.errors import PresetError, unknown_name

NAMES: dict[str, dict[str, str]] = {
    "model": {
        "byte_gpt": "lightning_solo.reference.byte_gpt:ByteGPT",
        "hf_auto": "lightning_solo.fine_tuning.auto_model:HFAuto",
        "hf_causal_lm": "lightning_solo.fine_tuning.causal_lm:HFCausalLM",
    },
    "data": {
        "stdlib_text": "lightning_solo.reference.stdlib_text:StdlibText",
        "chat": "lightning_solo.fine_tuning.chat:ChatData",
        "text": "lightning_solo.fine_tuning.text:TextData",
        "labelled": "lightning_solo.fine_tuning.labelled:LabelledRows",
    },
    "optimizer": {
        "adamw": "torch.optim.adamw:AdamW",
        "sgd": "torch.optim.sgd:SGD",
        "adafactor": "torch.optim._adafactor:Adafactor",
        "lion": "lightning_solo.optim.one_by_one:Lion",
        "muon": "lightning_solo.optim.muon:MuonAdamW",
        "adamw_8bit": "lightning_solo.optim.one_by_one:AdamW8bit",
        "adamw_4bit": "lightning_solo.optim.one_by_one:AdamW4bit",
        "schedule_free_adamw": "lightning_solo.optim.schedule_free:ScheduleFreeAdamW",
    },
}
"""Kind -> name -> class, for models, data and optimizers."""


def target_of(kind: str, name: object, option: str) -> str:
    """Return the ``"module:Class"`` of a name.

    Raises:
        PresetError: an unknown name; the message starts with ``option``, the path of the name.
    """
    names = NAMES[kind]
    if not isinstance(name, str) or name not in names:
        raise PresetError(unknown_name(option, name, kind, names))
    return names[name]
