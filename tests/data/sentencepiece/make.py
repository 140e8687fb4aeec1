"""Makes the small SentencePiece models of this folder and what the library encodes with them.

Needs the package sentencepiece (made with 0.2.3) and the repository's README.md as training text:
    python3 make.py README.md OUTPUT_FOLDER
The models need not come out the same from another text or version; expected.jsonl belongs to the
models that it was written with.
"""
import io
import json
import random
import sys

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as pb2

TEXTS = [
    "", " ", "   ", "Hello world", "  two  spaces   inside  ", "tab\tand\nline\n\nends", "\u2581literal \u2581 marks\u2581",
    "a<sep>b <sep> <sep><sep>", "<ctl>", "<s>text</s>", "<unk>", "<0x41>", "na\u00efve caf\u00e9 \u00fcber", "\u65e5\u672c\u8a9e \u6f22\u5b57",
    "\U0001f600\U0001f680 rockets", "aaaa", "aaaaa aaaaaaa", "baaab", "abababab", "zz zzz z", "don't can't won't", "    indented\n\n\ncode",
    "The quantizer writes tensors; the server reads them.", "tile column outlier slots --density 0.03", "1234567890 3.14159", "\u0000\u0001\u007f",
    "xabc abcx xabcabc", "nope", "q w e r t y",
]


def random_texts(count):
    rng = random.Random(7)
    words = ["the", "a", "aa", "aaa", "zz", "<sep>", " ", "  ", "\u2581", "\n\n", "server", "quant", "xab", "abc", "\u00e9", "\u65e5", "<", "0x", "."]
    return ["".join(rng.choice(words) for _ in range(rng.randint(1, 30))) for _ in range(count)]


def train(text, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()), model_writer=model, model_type="bpe",
        normalization_rule_name="identity", minloglevel=2, **options)
    return model.getvalue()


def ties():
    """Equal scores, a piece made of a character that is none, user-defined pieces that overlap."""
    model = pb2.ModelProto()
    model.trainer_spec.model_type = 2
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    normal = [("a", -5), ("b", -5), ("c", -5), ("x", -5), ("\u2581", -5), ("aa", 1), ("aaa", 1), ("ab", 1), ("ba", 1),
              ("aab", 0.5), ("zz", 2), ("\u2581a", 0.5), ("abab", 0)]
    for content, kind in [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("xab", 4), ("abc", 4)]:
        model.pieces.add(piece=content, score=0, type=kind)
    for content, score in normal:
        model.pieces.add(piece=content, score=score)
    return model.SerializeToString()


def main():
    text = open(sys.argv[1], encoding="utf-8").read()
    models = {
        "trimmed": train(text, vocab_size=700, byte_fallback=True, remove_extra_whitespaces=True,
                         user_defined_symbols=["<sep>", "don't"], control_symbols=["<ctl>"]),
        "whitespace": train(text, vocab_size=420, byte_fallback=False, remove_extra_whitespaces=False,
                            add_dummy_prefix=False, character_coverage=0.98,
                            user_defined_symbols=["\u2581\u2581", "\u2581\u2581\u2581\u2581", "\n\n", "<sep>"]),
        "ties": ties(),
    }
    expected = {}
    for name, model in models.items():
        with open(f"{sys.argv[2]}/{name}.model", "wb") as file:
            file.write(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        expected[name] = [{"text": text, "ids": processor.encode(text)} for text in TEXTS + random_texts(60)]
    with open(f"{sys.argv[2]}/expected.jsonl", "w", encoding="utf-8") as file:
        for name, entries in expected.items():
            for entry in entries:
                file.write(json.dumps({"model": name, **entry}, separators=(",", ":")) + "\n")


main()
