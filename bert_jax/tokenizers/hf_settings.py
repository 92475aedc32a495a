"""Tokenizer settings of transformers in a vocabulary's directory.

Each is used, has no effect on ids, or is an error. A name that is not known here, e.g. of a newer transformers, is a
note: the conversion compares ids with transformers.

The files are tokenizer_config.json, special_tokens_map.json and added_tokens.json. Settings have the meaning that they
have in transformers 4 and 5 (tokenization_utils_base.py, and the class of the tokenizer).
"""

import functools
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

from etils import epath
from tokenizers import AddedToken

from bert_jax import field_validation
from bert_jax.errors import UserError
from bert_jax.storage.json_files import read_json_object
from bert_jax.tokenizers.kinds import SPECIAL_TOKENS, AlbertPreprocessing
from bert_jax.tokenizers.models import TokenizerModel

CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
COPY_AGAIN = "copy it again"
"""Advice for a damaged file."""


class _FileType(NamedTuple):
    """What transformers has for a kind of vocabulary file."""

    classes: tuple[str, ...]
    """Tokenizer classes that the file describes completely, without "Tokenizer" at the end."""
    settings: tuple[str, ...] = ()
    """Settings that these classes use."""


_WORDPIECE = ("Bert", "DistilBert", "Electra", "MobileBert", "SqueezeBert", "ConvBert")
_BYTE_BPE = ("Roberta", "GPT2", "Longformer", "Bart")
FILE_TYPES = {
    ".txt": _FileType(_WORDPIECE, ("do_lower_case", "strip_accents", "tokenize_chinese_chars")),
    ".bpe": _FileType(_BYTE_BPE, ("add_prefix_space",)),
    ".model": _FileType(("Albert",), ("do_lower_case", "keep_accents")),
    ".json": _FileType(
        (
            *(*_WORDPIECE, *_BYTE_BPE, "Albert"),
            *("XLMRoberta", "Camembert", "MPNet", "Deberta", "DebertaV2", "BigBird"),
        )
    ),
}
"""By file type (".bpe": merges). A tokenizer.json uses the settings of the type to which its class belongs."""
_GENERIC_CLASSES = frozenset({"", "PreTrainedTokenizer", "TokenizersBackend"})
"""Classes without settings of their own, and no class."""
_CLASS_OF_MODEL_TYPE = {
    "bert": "BertTokenizer",
    "distilbert": "DistilBertTokenizer",
    "electra": "ElectraTokenizer",
    "mobilebert": "MobileBertTokenizer",
    "roberta": "RobertaTokenizer",
    "albert": "AlbertTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
    "xlnet": "XLNetTokenizer",
    "t5": "T5Tokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
}
"""By the model_type of config.json, if no file names a class."""


class _Used(TypedDict, total=False):
    """Types of the values that are used."""

    do_lower_case: bool
    strip_accents: bool | None
    tokenize_chinese_chars: bool
    add_prefix_space: bool
    keep_accents: bool
    added_tokens_decoder: dict[str, Any] | None


_SWITCHES = _Used.__annotations__.keys() - {"added_tokens_decoder"}
_FIXED = {
    "do_basic_tokenize": (True,),
    "never_split": (None, []),
    "clean_text": (True,),
    "wordpieces_prefix": ("##",),
    "max_input_chars_per_word": (100,),
    "remove_space": (True,),
    "sp_model_kwargs": (None, {}),
    "split_by_punct": (False,),
    "init_inputs": ([],),
    "dropout": (None, 0, 0.0),
    "split_special_tokens": (None, False),
    "vocab_type": ("spm",),
    # Of BertJapaneseTokenizer.
    "do_word_tokenize": (True,),
    "do_subword_tokenize": (True,),
    "word_tokenizer_type": ("basic",),
    "subword_tokenizer_type": ("wordpiece",),
    **dict.fromkeys(("mecab_kwargs", "sudachi_kwargs", "jumanpp_kwargs"), (None,)),
}
"""Settings that change ids, with the supported values."""
_ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
_TOKENS = ("bos_token", "eos_token", "additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_IGNORED = frozenset(
    (
        # Lengths, padding and truncation: texts are truncated to the positions of the model, and padding is masked.
        *("model_max_length", "max_len", "max_length", "max_seq_length", "padding", "padding_side"),
        *("pad_to_multiple_of", "pad_token_type_id", "stride"),
        *("truncation", "truncation_side", "truncation_strategy"),
        # Tokens around a text: [CLS] and [SEP] are always added as in BERT.
        *("add_bos_token", "add_eos_token", "add_special_tokens"),
        # Decoding, offsets, conversations.
        *("clean_up_tokenization_spaces", "errors", "trim_offsets", "spaces_between_special_tokens", "chat_template"),
        # Id of the unknown piece in the SentencePiece model, which `save_pretrained` of transformers 5 copies; classes
        # take the id from the vocabulary.
        "unk_id",
        # Origin of the files, and programs that read them.
        *("tokenizer_class", "auto_map", "name_or_path", "_name_or_path", "_commit_hash", "transformers_version"),
        *("special_tokens_map_file", "added_tokens_file", "tokenizer_file", "full_tokenizer_file", "vocab_file"),
        *("merges_file", "use_fast", "backend", "is_local", "local_files_only", "processor_class", "model_type"),
        *("model_input_names", "return_token_type_ids", "return_attention_mask", "verbose"),
    )
)


class _AddedTokenEntry(NamedTuple):
    """A token that a file adds to a vocabulary."""

    file: str
    content: Any
    """Its text; in a damaged file anything."""
    token_id: str | None
    flags: dict[str, bool]
    """Of `tokenizers.AddedToken`, as far as the file states them."""


@dataclass(frozen=True)
class Settings:
    """The settings in the files of a vocabulary's directory, created by `read`."""

    vocabulary: epath.Path
    file_type: str
    """One of FILE_TYPES."""
    stated: dict[str, Any]
    """Of tokenizer_config.json."""
    special: dict[str, Any]
    """Of special_tokens_map.json."""
    added: dict[str, Any]
    """Of added_tokens.json."""
    config: dict[str, Any]
    """Of config.json."""

    @functools.cached_property
    def _tokenizer_class(self) -> str:
        """The class in transformers, without "Fast"; empty if unknown."""
        named = self.stated.get("tokenizer_class") or self.config.get("tokenizer_class")
        return str(named or _CLASS_OF_MODEL_TYPE.get(str(self.config.get("model_type")), "")).removesuffix("Fast")

    def switch(self, name: str) -> bool | None:
        """The stated value of a setting; None: not stated."""
        return self.stated.get(name)

    def preprocessing(self) -> AlbertPreprocessing | None:
        """What ALBERT's class does to text; None where the tokenizer is not an ALBERT's."""
        if self._tokenizer_class != "AlbertTokenizer" and not (self.vocabulary.parent / "albert_config.json").exists():
            return None
        lowercase, keep = self.switch("do_lower_case"), self.switch("keep_accents")
        return AlbertPreprocessing(True if lowercase is None else lowercase, bool(keep))

    def check_against(self, model: TokenizerModel, lowercase: bool | None) -> None:
        """Compare the files with the tokenizer that was built from them.

        Args:
          model: the tokenizer.
          lowercase: overrides do_lower_case; None: not overridden.

        Raises:
          UserError: a setting contradicts a tokenizer.json, or a token differs from that in a file.
        """
        overruled = () if lowercase is None else ("do_lower_case",)
        for name in self._used():
            if not {name} <= self.stated.keys() & model.settings.keys() or (name in overruled):
                continue
            stated, does = self.stated[name], model.settings[name]
            if stated is None:  # strip_accents: the value of do_lower_case
                stated = model.settings["do_lower_case"]
            if stated != does:
                raise UserError(
                    f"{self._path(CONFIG)}: {name} is {json.dumps(self.stated[name])}, but {self.vocabulary.name} has "
                    f"{json.dumps(does)}: correct the value that the model was not trained with"
                )
        for file, values in ((CONFIG, self.stated), (SPECIAL, self.special)):
            for role, role_id in model.roles.items():
                name, used = f"{role}_token", model.pieces[role_id]
                content = _content(values.get(name))
                if content in (None, used) or (role == "unk" and model.kind == "byte-level BPE"):
                    continue
                raise UserError(
                    f"{self._path(file)}: {name} is '{content}', but {self.vocabulary.name} has '{used}': only the"
                    " special tokens of BERT and RoBERTa are supported"
                )
        ids = {piece: i for i, piece in enumerate(model.pieces)}
        for file, content, token_id, _ in self._added_tokens():
            known_id = ids.get(content) if isinstance(content, str) else None
            if known_id is None or token_id not in (None, str(known_id)):
                how = "at all" if token_id is None else f"as id {token_id[:40]}"
                raise UserError(
                    f"{self._path(file)}: adds the token '{content}', which {self.vocabulary.name} does not have"
                    f" {how}: give a tokenizer.json that has it; save_pretrained of transformers writes one"
                )

    def added_tokens(self, known: Collection[str]) -> list[AddedToken]:
        """Tokens that the files add to those that a vocabulary matches in text, or change, as in transformers.

        Flags come from added_tokens_decoder. Without it, those of a tokenizer.json are kept, and beside another
        vocabulary the other files state them.

        Args:
          known: the tokens that the vocabulary matches.
        """
        has_decoder = self.stated.get("added_tokens_decoder") is not None
        tokens = {}
        for _, content, token_id, flags in self._added_tokens():
            decides = token_id is not None if has_decoder else self.file_type != ".json"
            if decides or content not in (*known, *tokens):
                tokens[content] = AddedToken(content, **flags)
        return list(tokens.values())

    def _used(self) -> tuple[str, ...]:
        """Names of the settings that the class uses."""
        if self.file_type != ".json":
            return FILE_TYPES[self.file_type].settings
        of_class = (name for name, each in FILE_TYPES.items() if each.settings and self._is_class_of(name))
        # The generic class of transformers 4 also uses add_prefix_space.
        return FILE_TYPES[next(of_class, ".bpe")].settings

    def _is_class_of(self, file_type: str) -> bool:
        return self._tokenizer_class in {f"{name}Tokenizer" for name in FILE_TYPES[file_type].classes}

    def check_supported(self) -> None:
        """Check that all settings are supported.

        Raises:
          UserError: an unknown class, or a value that is not supported.
        """
        name = self._tokenizer_class
        if name not in _GENERIC_CLASSES and not self._is_class_of(self.file_type):
            advice = "move the tokenizer's files away to convert the model without a tokenizer"
            if self._is_class_of(".json"):
                advice = "give its tokenizer.json, which AutoTokenizer and save_pretrained of transformers make"
            file = CONFIG if self.stated.get("tokenizer_class") else "config.json"
            raise UserError(
                f"{self._path(file)}: tokenizer_class {name} cannot be read from {self.vocabulary.name}: {advice}"
            )
        custom = self.stated.get("auto_map")
        if custom and (not isinstance(custom, dict) or custom.get("AutoTokenizer")):
            raise UserError(f"{self._path(CONFIG)}: auto_map names a tokenizer in Python code, which is never run")
        if self._vocabulary_is_complete:
            return
        where = self._path(CONFIG)
        used = {name: value for name, value in self.stated.items() if name not in _SWITCHES or name in self._used()}
        field_validation.from_json(_Used, used, where)
        for name, value in self.stated.items():
            if name == "never_split" and isinstance(value, list):
                value = [token for token in value if token not in SPECIAL_TOKENS]
            if name in _FIXED and value not in _FIXED[name]:
                raise UserError(
                    f"{where}: {name} {json.dumps(value)[:40]} is not supported; only {json.dumps(_FIXED[name][-1])} is"
                )

    @property
    def _vocabulary_is_complete(self) -> bool:
        """Whether the tokenizer.json describes everything: its class has no settings of its own."""
        return self.file_type == ".json" and self._tokenizer_class in _GENERIC_CLASSES

    @property
    def note(self) -> str | None:
        """One line about settings that are not known; None if all are."""
        known = (_IGNORED, _FIXED, _ROLES, _TOKENS, _Used.__annotations__)
        unknown = [name for name in self.stated if not any(name in names for names in known)]
        if not unknown or self._vocabulary_is_complete:
            return None
        return (
            f"{self._path(CONFIG)}: not used, because it is unknown: {', '.join(sorted(unknown))}. If it changes ids, "
            "they differ from those of transformers, with which `bert-jax convert` compares them"
        )

    def _added_tokens(self) -> Iterator[_AddedTokenEntry]:
        """Tokens that the files add, those of added_tokens_decoder and added_tokens.json last, with their ids."""
        special = []
        for file, values in ((CONFIG, self.stated), (SPECIAL, self.special)):
            for name in (*_TOKENS, *_ROLES):
                value = values.get(name)
                value = list(value.values()) if isinstance(value, dict) and "content" not in value else value
                for token in value if isinstance(value, list) else [value]:
                    special.append(_content(token))
                    if isinstance(token, dict) or (token is not None and name in _TOKENS):
                        yield _AddedTokenEntry(file, _content(token), None, _flags(token) | {"special": True})
        decoder = self.stated.get("added_tokens_decoder")
        for token_id, token in decoder.items() if isinstance(decoder, dict) else ():
            yield _AddedTokenEntry(CONFIG, _content(token), token_id, _flags(token))
        for content, token_id in self.added.items():
            yield _AddedTokenEntry(ADDED, content, str(token_id), {"special": content in special})

    def _path(self, file: str) -> str:
        return str(self.vocabulary.parent / file)


def _content(token: Any) -> Any:
    """The text of a token, given as a string or as an object."""
    return token.get("content", token) if isinstance(token, dict) else token


def _flags(token: Any) -> dict[str, bool]:
    stated = token if isinstance(token, dict) else {}
    return {name: stated[name] for name in _FLAGS if isinstance(stated.get(name), bool)}


def read(vocabulary: epath.Path, file_type: str) -> Settings:
    """Read the settings in the directory of a vocabulary.

    Args:
      vocabulary: the vocabulary file.
      file_type: one of FILE_TYPES.

    Raises:
      UserError: a file is not a JSON object, or a class or value is not supported.
    """
    paths = (vocabulary.parent / name for name in (CONFIG, SPECIAL, ADDED, "config.json"))
    settings = Settings(vocabulary, file_type, *(read_json_object(path, COPY_AGAIN, missing_ok=True) for path in paths))
    settings.check_supported()
    return settings
