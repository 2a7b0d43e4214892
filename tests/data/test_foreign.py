"""Other people's token files, made here by their own descriptions: struct, numpy and pickle, none of our writers."""

import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_data import prepare_small

from paceline.base.errors import UserError
from paceline.data.dataset import Dataset, is_dataset
from paceline.data.mixture import Blend
from paceline.data.packing import ensure_packing

TEXT = "To be, or not to be: that is the question.\nÉcoute.\n"


def nanogpt(folder: Path, train: list[int], validation: list[int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.array(train, dtype=np.uint16).tofile(folder / "train.bin")
    np.array(validation, dtype=np.uint16).tofile(folder / "val.bin")
    return folder


def characters(folder: Path) -> Path:
    """As its data/shakespeare_char/prepare.py leaves it."""
    letters = sorted(set(TEXT))
    stoi = {character: i for i, character in enumerate(letters)}
    ids = [stoi[character] for character in TEXT * 3]
    nanogpt(folder, ids, ids[:30])
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


def llm_c(path: Path, ids: list[int], magic: int = 20240520, version: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    code = "H" if version == 1 else "I"
    head = struct.pack("<256i", magic, version, len(ids), *[0] * 253)
    path.write_bytes(head + struct.pack(f"<{len(ids)}{code}", *ids))


def test_nanogpt_characters(tmp_path: Path) -> None:
    dataset = Dataset.open(characters(tmp_path / "shakespeare_char"))
    assert dataset.name == "shakespeare_char"
    assert dataset.vocab_size == len(set(TEXT))
    assert dataset.tokenizer().decode(dataset.train.read(0, len(TEXT)).tolist()) == TEXT
    assert dataset.tokenizer().encode(TEXT) == dataset.train.read(len(TEXT), len(TEXT)).tolist()
    assert dataset.token_bytes is not None
    assert int(dataset.token_bytes[dataset.train.read(0, len(TEXT))].sum()) == len(TEXT.encode())
    assert dataset.end_of_text is None
    dataset.verify()
    assert Dataset.open(dataset.folder, 1000).vocab_size == len(set(TEXT))
    with pytest.raises(UserError, match=r"model.vocab-size is 5, smaller than the data's vocabulary"):
        Dataset.open(dataset.folder, 5)


def test_nanogpt_without_a_vocabulary(tmp_path: Path) -> None:
    folder = nanogpt(tmp_path / "openwebtext", [50256, 5, 6, 7], [50256, 8])
    with pytest.raises(UserError, match=r"give --model.vocab-size 50257 \(GPT-2's\)"):
        Dataset.open(folder)
    dataset = Dataset.open(folder, 50257)
    assert dataset.vocab_size == 50257
    assert dataset.train.read(0, 4).tolist() == [50256, 5, 6, 7]
    assert dataset.validation.read(0, 2).tolist() == [50256, 8]
    assert dataset.tokenizer_json is dataset.token_bytes is None


def test_half_a_token_is_refused_as_truncated(tmp_path: Path) -> None:
    folder = nanogpt(tmp_path, [1, 2, 3], [1, 2])
    with (folder / "train.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"train.bin is truncated: its 7 bytes are not whole uint16 tokens"):
        Dataset.open(folder, 10)


@pytest.mark.parametrize(
    ("written", "vocab_size", "says"),
    [
        (np.uint32, 50257, r"train.bin is not uint16 tokens: in all 32 pairs .* the second is 0 .*astype\(np.uint16\)"),
        (np.uint64, 50257, "train.bin is not uint16 tokens"),
        (np.uint64, 128256, "train.bin is not uint32 tokens"),
        (np.uint16, 128256, "train.bin has id .*, or is not uint32"),
    ],
)
def test_tokens_of_another_width_are_refused(tmp_path: Path, written: Any, vocab_size: int, says: str) -> None:
    """Their halves are ids of the vocabulary, too (mutation: open as uint16 without a look)."""
    ids = np.arange(1000, 1032).astype(written)
    for name in ("train.bin", "val.bin"):
        ids.tofile(tmp_path / name)
    with pytest.raises(UserError, match=says):
        Dataset.open(tmp_path, vocab_size)


def test_a_vocabulary_above_65536_means_uint32(tmp_path: Path) -> None:
    ids = [128255, 1000, 2000, 70000] * 10
    for name in ("train.bin", "val.bin"):
        np.array(ids, dtype=np.uint32).tofile(tmp_path / name)
    assert Dataset.open(tmp_path, 128256).train.read(0, 40).tolist() == ids
    np.array(ids[:16], dtype=np.uint32).tofile(tmp_path / "train.bin")
    with pytest.raises(UserError, match=r"not uint16 tokens: in all 16 pairs .* 0 or 1"):
        Dataset.open(tmp_path, 50257)
    with (tmp_path / "train.bin").open("ab") as file:
        file.write(b"xx")
    with pytest.raises(UserError, match=r"train.bin is truncated: its 66 bytes are not whole uint32 tokens"):
        Dataset.open(tmp_path, 128256)


def test_two_characters_are_no_wider_tokens(tmp_path: Path) -> None:
    """A text of two characters in turn, and one of few: that is uint16, though every second id is 0 or 1."""
    assert Dataset.open(nanogpt(tmp_path / "two", [1, 0] * 100, [1, 0]), 2).train.num_tokens == 200
    assert Dataset.open(nanogpt(tmp_path / "few", [7, 0, 9, 0, 8, 1], [1, 0]), 10).train.num_tokens == 6


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_meta_pkl_is_not_executed(tmp_path: Path) -> None:
    folder = nanogpt(tmp_path / "data", [1, 2, 3], [1, 2])
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 4, "itos": Evil(tmp_path / "ran")}))
    with pytest.raises(UserError, match=r"meta.pkl"):
        Dataset.open(folder)
    assert not (tmp_path / "ran").exists()


def test_llm_c_shards_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number, ids in ((2, [5, 6]), (1, [3, 4]), (10, [7])):
        llm_c(tmp_path / f"fineweb_train_{number:06d}.bin", ids)
    llm_c(tmp_path / "fineweb_val_000000.bin", [9, 8])
    (tmp_path / "README.md").write_text("fineweb")
    dataset = Dataset.open(tmp_path, 50257)
    assert dataset.train.read(0, 5).tolist() == [3, 4, 5, 6, 7]
    assert dataset.validation.read(0, 2).tolist() == [9, 8]
    dataset.verify()


@pytest.mark.parametrize(
    ("train", "validation"),
    [("TinyStories_train.bin", "TinyStories_val.bin"), ("train.bin", "val.bin"), ("train_0.bin", "validation.bin")],
)
@pytest.mark.parametrize(("magic", "version"), [(20240520, 1), (20240520, 2), (20240801, 7)])
def test_the_names_and_versions_in_use(tmp_path: Path, train: str, validation: str, magic: int, version: int) -> None:
    llm_c(tmp_path / train, [1, 2, 3], magic, version)
    llm_c(tmp_path / validation, [4, 5], magic, version)
    dataset = Dataset.open(tmp_path, 128256)
    assert dataset.index is None
    assert dataset.train.read(0, 3).tolist() == [1, 2, 3]
    assert dataset.train.dtype == (np.uint16 if version == 1 else np.uint32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-1], r"a_train_0.bin is truncated: 3 tokens make 1030 bytes, it has 1029"),
        (lambda b: b[:900], r"a_train_0.bin is truncated: 900 bytes"),
        (lambda b: struct.pack("<i", 20240522) + b[4:], r"a_train_0.bin is not a token shard: it begins with 20240522"),
        (lambda b: struct.pack("<ii", 20240801, 1) + b[8:], r"a_train_0.bin has magic 20240801 and version 1"),
        (lambda b: b[:4] + struct.pack("<i", 3) + b[8:], r"a_train_0.bin has version 3"),
    ],
)
def test_what_is_no_shard_is_refused(tmp_path: Path, damage: Any, message: str) -> None:
    llm_c(tmp_path / "a_train_0.bin", [1, 2, 3])
    llm_c(tmp_path / "a_val_0.bin", [1, 2, 3])
    path = tmp_path / "a_train_0.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message):
        Dataset.open(tmp_path, 100)


def test_names_of_other_programs_are_no_token_files(tmp_path: Path) -> None:
    """Hugging Face's trainer leaves training_args.bin in a folder (mutation: the pattern train*.bin)."""
    (tmp_path / "training_args.bin").write_bytes(b"PK" * 100)
    (tmp_path / "value_head.bin").write_bytes(b"PK" * 100)
    assert not is_dataset(tmp_path)


@pytest.mark.parametrize(("missing", "split"), [("train.bin", "train"), ("val.bin", "validation")])
def test_a_missing_split_is_refused(tmp_path: Path, missing: str, split: str) -> None:
    folder = nanogpt(tmp_path, [1, 2, 3], [1, 2])
    (folder / missing).unlink()
    assert is_dataset(folder)
    with pytest.raises(UserError, match=rf"has token files but none for {split}: nothing there is named"):
        Dataset.open(folder, 10)


def test_an_unfinished_preparation_of_ours_is_not_taken_for_llm_c(tmp_path: Path) -> None:
    llm_c(tmp_path / "train-00000.bin", [1, 2, 3])
    llm_c(tmp_path / "validation-00000.bin", [1, 2, 3])
    np.save(tmp_path / "train-00000.starts.npy", np.array([0]))
    with pytest.raises(UserError, match="was not prepared to the end"):
        Dataset.open(tmp_path, 10)


def test_verify_names_the_token_beyond_the_vocabulary(tmp_path: Path) -> None:
    """In whatever is not looked at when a set is opened; here, as it was damaged since."""
    ids = [3] * 3_000_000  # more than one piece
    dataset = Dataset.open(nanogpt(tmp_path, ids, [1, 2]), 50257)
    ids[2_500_000] = 50257
    nanogpt(tmp_path, ids, [1, 2])
    seen: list[int] = []
    with pytest.raises(UserError, match=r"train.bin has id 50257 at token 2500000; the vocabulary has 50257"):
        dataset.verify(seen.append)
    with pytest.raises(UserError, match=r"train.bin has id 50257 at token 2500000"):
        dataset.train.gather([0, 2_499_999], [10, 5])
    assert sum(seen) == 6_000_000
    Dataset.open(tmp_path, 50258).verify()


def test_the_fingerprint_is_equal_where_the_files_are(tmp_path: Path) -> None:
    one = characters(tmp_path / "one")
    two = Path(shutil.copytree(one, tmp_path / "elsewhere"))
    assert Dataset.open(one).fingerprint == Dataset.open(two).fingerprint
    ids = np.fromfile(two / "train.bin", dtype=np.uint16)
    ids[40] ^= 1
    ids.tofile(two / "train.bin")
    assert Dataset.open(one).fingerprint != Dataset.open(two).fingerprint
    assert Dataset.open(nanogpt(tmp_path / "x", [1], [2]), 5).fingerprint != Dataset.open(tmp_path / "x", 6).fingerprint


def test_documents_are_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not say where its documents begin, and data.packing bestfit"):
        Dataset.open(characters(tmp_path / "c")).documents("train")


DOCUMENTS = [[5, 6, 7, 99], [8, 99], [], *([i, i + 1, 99] for i in range(10, 50))]  # 99 ends a document


def megatron(path: Path, documents: list[list[int]], code: int = 8) -> None:
    """By the description of its IndexedDataset: each document is one sequence."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = {8: np.uint16, 4: np.int32}[code]
    np.array([i for document in documents for i in document], dtype=dtype).tofile(path.with_suffix(".bin"))
    lengths = np.array([len(document) for document in documents], np.int32)
    pointers = (np.cumsum(lengths) - lengths).astype(np.int64) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    ends = np.arange(len(documents) + 1, dtype=np.int64)
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + ends.tobytes())


def datatrove(path: Path, documents: list[list[int]], code: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    dtype = {8: np.uint16, 4: np.uint32}[code]
    np.array([i for document in documents for i in document], dtype=dtype).tofile(path.with_suffix(".ds"))
    ends = np.cumsum([len(document) for document in documents])
    Path(f"{path}.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    Path(f"{path}.ds.metadata").write_text("gpt2|2\n130\n130 T")


@pytest.mark.parametrize("code", [8, 4])
@pytest.mark.parametrize("write", [megatron, datatrove])
def test_megatron_and_datatrove_with_their_documents(tmp_path: Path, write: Any, code: int) -> None:
    """In files for both splits, and in one, whose last documents are for validation (mutation: the border is a token's
    and not a document's; or the second file's documents are not behind the first's)."""
    both, one = tmp_path / "both", tmp_path / "one"
    for name, documents in (("a_text_document", DOCUMENTS[:9]), ("b_text_document", DOCUMENTS[9:])):
        write(both / name, documents, code)
    write(both / "a_valid_text_document", DOCUMENTS[:2], code)
    write(one / "text_document", DOCUMENTS, code)
    filled = [document for document in DOCUMENTS if document]
    for folder, train, validation in ((both, filled, filled[:2]), (one, filled[:-1], filled[-1:])):
        assert is_dataset(folder)
        dataset = Dataset.open(folder, 100)
        for split, stream, documents in (
            ("train", dataset.train, train),
            ("validation", dataset.validation, validation),
        ):
            assert stream.read(0, stream.num_tokens).tolist() == [i for document in documents for i in document]
            listed = dataset.documents(split)
            assert listed.lengths.tolist() == [len(document) for document in documents]
            assert listed.starts.tolist() == [0, *np.cumsum(listed.lengths)[:-1].tolist()]
        dataset.verify()


@pytest.mark.parametrize("write", [megatron, datatrove])
def test_verify_reads_a_file_of_two_splits_once(tmp_path: Path, write: Any) -> None:
    """Finds: all that stands before the validation split was read once more, at once into memory."""
    write(tmp_path / "text_document", DOCUMENTS)
    dataset, seen = Dataset.open(tmp_path, 100), list[int]()
    assert dataset.validation.num_tokens > 0
    dataset.verify(seen.append)
    assert sum(seen) == dataset.num_bytes == 2 * sum(map(len, DOCUMENTS))


@pytest.mark.parametrize("with_validation", [True, False])
@pytest.mark.parametrize("documents", [[], [[], []]], ids=["no document", "empty documents"])
@pytest.mark.parametrize("write", [megatron, datatrove])
def test_an_empty_partition_beside_others_is_passed_over(
    tmp_path: Path, write: Any, documents: list[list[int]], with_validation: bool
) -> None:
    write(tmp_path / "a_train", DOCUMENTS)
    write(tmp_path / "b_train", documents)
    if with_validation:
        write(tmp_path / "c_val", DOCUMENTS[:2])
    filled = [document for document in DOCUMENTS if document]
    train = Dataset.open(tmp_path, 100).documents("train").lengths.tolist()
    assert train == [len(document) for document in filled[: None if with_validation else -1]]


def test_other_documents_of_the_same_tokens_are_packed_anew(tmp_path: Path) -> None:
    """Finds: rows of the documents of an index that was written again since."""
    data, joined = tmp_path / "data", [DOCUMENTS[0] + DOCUMENTS[1], *DOCUMENTS[2:]]
    megatron(data / "a_train", DOCUMENTS)
    megatron(data / "a_val", DOCUMENTS[:2])
    folder = ensure_packing(Dataset.open(data, 100), 8, tmp_path)
    assert ensure_packing(Dataset.open(data, 100), 8, tmp_path) == folder
    megatron(data / "a_train", joined)
    assert ensure_packing(Dataset.open(data, 100), 8, tmp_path) != folder


def test_a_link_to_tokens_that_are_gone_is_named(tmp_path: Path) -> None:
    megatron(tmp_path / "text_document", DOCUMENTS)
    (tmp_path / "text_document.bin").rename(tmp_path / "elsewhere")
    (tmp_path / "text_document.bin").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"text_document\.bin can not be read: No such file"):
        Dataset.open(tmp_path, 100)


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, b"x", "can not be read as Megatron's index: it begins with b'xM"),
        (17, b"\x05", "its tokens have type 5; known are 4"),
        (34, b"\x09", "has 126 tokens, and text_document.idx ends at 131: copy both again"),
        (-8, b"\x01", "its documents are not ascending"),
        (25, b"\x80", "can not be read as Megatron's index: .*int"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, at: int, value: bytes, says: str) -> None:
    megatron(tmp_path / "text_document", DOCUMENTS)
    path = tmp_path / "text_document.idx"
    content = bytearray(path.read_bytes())
    content[at] = value[0]
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        Dataset.open(tmp_path, 100)


def test_a_document_token_gives_the_beginnings_of_foreign_documents(tmp_path: Path) -> None:
    """For packing and masks (mutation: the first document begins at its token alone)."""
    ids = [3, 4, 50256, 7, 8, 50256, 9, 50256]
    for split in ("train", "val"):
        llm_c(tmp_path / "web" / f"web_{split}_000.bin", ids)
    with pytest.raises(UserError, match=r"does not say where its documents begin.*--data.document-token-id"):
        Dataset.open(tmp_path / "web", 50257).documents("train")
    dataset = Dataset.open(tmp_path / "web", 50257, 50256)
    assert dataset.documents("train").starts.tolist() == [0, 2, 5, 7]
    assert dataset.end_of_text == 50256
    with pytest.raises(UserError, match=r"document-token-id is 50257; the vocabulary of .* has the ids 0 to 50256"):
        Dataset.open(tmp_path / "web", 50257, 50257)
    small = prepare_small(tmp_path / "prepared", [[1, 2, 3]] * 9)
    with pytest.raises(UserError, match=r"document-token-id is 5, and in small the token 256 begins documents"):
        Dataset.open(small, 0, 5)


def test_foreign_tokens_are_mixed_with_prepared_ones_of_the_same_tokenizer(tmp_path: Path) -> None:
    """If the user says so, by its document token (mutation: unknown tokenizers are taken for equal)."""
    small = prepare_small(tmp_path / "prepared", [[1, 2, 3]] * 9)
    for split in ("train", "val"):
        llm_c(tmp_path / "web" / f"web_{split}_000.bin", [256, 1, 2, 3] * 5)
    folders = [(tmp_path / "web", 1.0), (small, 1.0)]
    with pytest.raises(
        UserError, match=r"with an unknown tokenizer: if it is the same, say so .*--data.document-token-id 256"
    ):
        Blend.open(folders, 257)
    mixed = Blend.open(folders, 257, 256)
    assert mixed.first.folder == small
    assert mixed.training(4, mask_documents=True, cache=tmp_path).document_token == 256


def test_foreign_tokens_in_a_mixture_have_the_prepared_vocabulary_where_the_models_is_rounded_up(
    tmp_path: Path,
) -> None:
    """As with --init-from, where model.vocab-size is 50304 for the 50257 ids of GPT-2."""
    small = prepare_small(tmp_path / "prepared", [[1, 2, 3]] * 9)
    for name, last in (("web", 256), ("other", 257)):
        for split in ("train", "val"):
            llm_c(tmp_path / name / f"web_{split}_000.bin", [256, 1, 2, 3, last] * 5)
    for parts in ([(tmp_path / "web", 1.0), (small, 1.0)], [(small, 1.0), (tmp_path / "web", 1.0)]):
        mixed = Blend.open(parts, 320, 256)
        assert [dataset.vocab_size for dataset in mixed.datasets] == [257, 257]
    with pytest.raises(UserError, match=r"257.*vocabulary"):
        Blend.open([(small, 1.0), (tmp_path / "other", 1.0)], 320, 256)
    assert Blend.open([(tmp_path / "other", 1.0)], 320, 256).first.vocab_size == 320
    with pytest.raises(UserError, match=r"model.vocab-size is 100, smaller than the data's vocabulary \(257"):
        Blend.open([(small, 1.0), (tmp_path / "web", 1.0)], 100)
