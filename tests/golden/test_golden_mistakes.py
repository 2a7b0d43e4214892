"""What commit 3c0a85c said of mistakes on the command line, in files and in scripts: exit status and message.

A message that is changed on purpose stays as it was in mistakes.json; CHANGED has the new one, and why. Words stand for
paths and for numbers of lines.
"""

import os
import re
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import golden
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.base.errors import PacelineError
from paceline.replica.batch import Batch
from paceline.replica.checkpoints import Checkpoints
from paceline.replica.replica import Replica
from paceline.replica.share import share
from paceline.replica.step import Step
from paceline.world.config import ParallelConfig
from paceline.world.env import detect
from paceline.world.runtime import World, open_world

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))
from in_process import here

FILE = "mistakes.json"

# ---- commands ----

TINY = "train --preset tiny"
PREPARE = "data prepare --out new --tokenizer bytes"
COMMANDS = (
    "trian",
    "resume",
    "sample",
    "train",
    "data info",
    "data prepar",
    "data prepare",
    "bench loder",
    "train --preset tinny",
    f"{TINY} stray",
    f"{TINY} --config missing.toml",
    f"{TINY} --config field.toml",
    f"{TINY} --config section.toml",
    f"{TINY} --config type.toml",
    f"{TINY} --config choice.toml",
    f"{TINY} --config syntax.toml",
    f"{TINY} --data.path empty",
    f"{TINY} --data.path missing",
    f"{TINY} --data.mix a",
    f"{TINY} --data.mix a=-1",
    f"{TINY} --data.path book.txt --data.mix a=1",
    f"{TINY} --model.n-layers 3",
    f"{TINY} --model.n-positions 32",
    f"{TINY} --model.dropout 1.5",
    f"{TINY} --nproc 0",
    f"{TINY} --optim.lr nan",
    f"{TINY} --optim.lr 0.1 --optim.weight-decay 10",
    f"{TINY} --optim.name adam",
    f"{TINY} --out book.txt",
    f"{TINY} --out full",
    f"{TINY} --out link",
    f"{TINY} --out run",
    f"{TINY} --parallel.backend nccl --parallel.device cpu",
    f"{TINY} --parallel.port 70000",
    f"{TINY} --parallel.shares 9,3",
    f"{TINY} --parallel.shares 9,4",
    f"{TINY} --parallel.shares auto --parallel.strategy fsdp",
    f"{TINY} --parallel.shares fast",
    f"{TINY} --parallel.wire bf16 --parallel.strategy ddp",
    f"{TINY} --train.device-batch-size 24",
    f"{TINY} --train.global-batch-size -4",
    f"{TINY} --train.steps",
    f"{TINY} --train.steps many",
    f"{TINY} --train.steps 5 --train.tokens 5000",
    "resume missing",
    "resume full",
    "resume run --model.n-layer 3",
    "resume run --step 99",
    "resume run --train.steps 3",
    "sample run --tokens -1",
    "sample run --temprature 1",
    "export run --out new --step -5",
    "bench link --preset demo --train.steps 5",
    "plan --calibrate --json --explain",
    "doctor --node-rank 1",
    "data info missing",
    f"{PREPARE} missing.txt",
    f"{PREPARE} book.txt --workers -1",
    f"{PREPARE} book.txt --validation-frac 1.5",
    f"{PREPARE} book.txt --validation book.txt",
    f"{PREPARE} latin1.txt",
    f"{PREPARE} utf16.txt",
    f"{PREPARE} broken.jsonl",
    f"{PREPARE} key.jsonl",
    f"{PREPARE} number.jsonl",
    f"{PREPARE} book.txt --tokenizer gpt22",
    f"{PREPARE} book.txt --tokenizer train:5",
)
FILES = {
    "book.txt": "".join(f"This is line {number}, not the last.\n" for number in range(400)),
    "field.toml": "[model]\nn_layers = 3\n",
    "section.toml": "[modle]\nn_layer = 3\n",
    "type.toml": '[train]\nsteps = "ten"\n',
    "choice.toml": '[model]\narch = "lama"\n',
    "syntax.toml": "[train\n",
    "full/letter.txt": "a letter\n",
    "broken.jsonl": '{"text": "one"}\n{"text": "two"}\n{"text": "three\n{"text": "four"}\n',
    "key.jsonl": '{"text": "one"}\n\n{"txt": "two"}\n',
    "number.jsonl": '{"text": "one"}\n{"text": 2}\n',
}


def make_files(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "latin1.txt").write_bytes("café naïve\n".encode("latin-1") * 50)
    (folder / "utf16.txt").write_bytes("some text\n".encode("utf-16") * 50)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("gone")
    (folder / "trained").symlink_to(golden.SHARDS / "trained")
    shutil.copytree(golden.HERE / "runs/zero", folder / "run")


def of_commands() -> dict[str, list[Any]]:
    """Returns command -> its exit status and message."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, PACELINE_CACHE=f"{folder}/cache"):
        place = Path(folder, "place")
        place.mkdir()
        make_files(place)
        for command in COMMANDS:
            ended = here(*shlex.split(command), cwd=place)
            said = ended.err
            if command == "train":  # without an option it is a question: its help, on standard output
                said = ended.out.partition("\n")[0]
            else:
                assert ended.out == "", ended.out
            found[command] = [ended.status, without_places(said, folder)]
    return found


def without_places(said: str, folder: str) -> str:
    return re.sub(r"\b\w+\.py:\d+", "SCRIPT:LINE", said.replace(folder, "FOLDER")).strip()


# ---- scripts, on one process ----

X = torch.ones(2, 4)
Mistake = Callable[[World, str], Any]  # called with a folder; it ends in an error or warns


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)


def made(world: World, model: nn.Module | None = None, **settings: Any) -> Replica:
    model = model or net()
    return Replica(model, sgd(model), world, **settings)


def begun(world: World, num_micro_batches: int = 1, **settings: Any) -> tuple[nn.Module, Step]:
    replica = made(world, **settings)
    return replica.model, replica.step(Batch([(number + 1) * X for number in range(num_micro_batches)]))


def optimizer_made_before(world: World, _: str) -> None:
    Replica(net(), sgd(net()), world)


def two_optimizers_of_one_weight(world: World, _: str) -> None:
    model = net()
    Replica(model, [sgd(model), sgd(model)], world)


def weights_without_an_optimizer(world: World, _: str) -> None:
    model = net()
    Replica(model, sgd(model[0]), world)


def an_optimizer_with_a_closure(world: World, _: str) -> None:
    model = net()
    Replica(model, torch.optim.LBFGS(model.parameters()), world)


def a_model_that_is_wrapped(world: World, _: str) -> None:
    made(world, nn.Sequential(nn.DataParallel(net())))


def a_model_elsewhere(world: World, _: str) -> None:
    made(world, net().to("meta"))


def an_unknown_wire(world: World, _: str) -> None:
    made(world, wire="bfloat16")


def an_unknown_strategy(world: World, _: str) -> None:
    made(world, strategy="zer0")


def an_update_of_ones_own(world: World, _: str) -> None:
    replica = made(world)
    replica.step(X).backward(replica.model(X).mean())
    replica.optimizers[0].step()


def loss_backward(world: World, _: str) -> None:
    model, _step = begun(world)
    model(X).mean().backward()


def a_finish_in_the_loop(world: World, _: str) -> None:
    model, step = begun(world)
    for batch in step:
        step.backward(model(batch).mean())
        step.finish()


def a_finish_too_early(world: World, _: str) -> None:
    model, step = begun(world, 2)
    for batch in step:
        step.backward(model(batch).mean())
        break
    step.finish()


def two_finishes(world: World, _: str) -> None:
    model, step = begun(world)
    step.backward(model(X).mean())
    step.finish()
    step.finish()


def no_finish(world: World, _: str) -> None:
    replica = made(world)
    for step in replica.steps(torch.ones(8, 4), batch_size=4):
        for batch in step:
            step.backward(replica.model(batch).mean())


def two_backwards(world: World, _: str) -> None:
    model, step = begun(world)
    for batch in step:
        step.backward(model(batch).mean())
        step.backward(model(batch).mean())


def a_micro_batch_left_out(world: World, _: str) -> None:
    model, step = begun(world, 2)
    for number, batch in enumerate(step):
        if number == 1:
            step.backward(model(batch).mean())


def a_loss_for_each_row(world: World, _: str) -> None:
    model, step = begun(world)
    step.backward(model(X))


def a_weight_that_is_no_number(world: World, _: str) -> None:
    model, step = begun(world)
    step.backward(model(X).mean(), weight=float("nan"))


def a_loss_without_a_graph(world: World, _: str) -> None:
    model, step = begun(world)
    step.backward(model(X).mean().detach())


def a_loss_divided_by_hand(world: World, _: str) -> None:
    model, step = begun(world, 2)
    for batch in step:
        step.backward(model(batch).mean() / 2)


def zero_grad_in_the_loop(world: World, _: str) -> None:
    model, step = begun(world, 2)
    for batch in step:
        model.zero_grad()
        step.backward(model(batch).mean())


def clipping_before_the_sum(world: World, _: str) -> None:
    model, step = begun(world)
    step.backward(model(X).mean())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def a_weight_unfrozen_later(world: World, _: str) -> None:
    model = net()
    model[0].requires_grad_(False)
    step = made(world, model).step(X)
    model[0].requires_grad_(True)
    step.backward(model(X).mean())


def parameters_added_later(world: World, _: str) -> None:
    replica = made(world)
    replica.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    step = replica.step(X)
    step.backward(replica.model(X).mean())
    step.finish()


def sparse_gradients(world: World, _: str) -> None:
    replica = made(world, nn.Embedding(5, 2, sparse=True))
    step = replica.step(torch.tensor([1]))
    step.backward(replica.model(torch.tensor([1])).mean())


def a_source_without_a_batch_size(world: World, _: str) -> None:
    share(TensorDataset(X), world)


def other_arguments_for_a_source(world: World, _: str) -> None:
    replica, data = made(world), TensorDataset(torch.ones(8, 4))
    next(iter(replica.steps(data, batch_size=4, max_steps=1)))
    next(iter(replica.steps(data, batch_size=2, max_steps=1)))


def no_total_for_a_function(world: World, _: str) -> None:
    next(iter(made(world).steps(lambda: X, micro_batches=2, epochs=1)))


def a_checkpoint_of_another_model(world: World, folder: str) -> None:
    Checkpoints(folder, net=made(world)).save()
    Checkpoints(folder, net=made(world, nn.Linear(4, 2))).restore()


def a_buffer_that_cannot_be_stored(world: World, folder: str) -> None:
    replica = made(world)
    replica.model.register_buffer("turns", torch.zeros(2, dtype=torch.complex64))
    Checkpoints(folder, net=replica).save()


SCRIPTS: tuple[Mistake, ...] = (
    optimizer_made_before,
    two_optimizers_of_one_weight,
    weights_without_an_optimizer,
    an_optimizer_with_a_closure,
    a_model_that_is_wrapped,
    a_model_elsewhere,
    an_unknown_wire,
    an_unknown_strategy,
    an_update_of_ones_own,
    loss_backward,
    a_finish_in_the_loop,
    a_finish_too_early,
    two_finishes,
    no_finish,
    two_backwards,
    a_micro_batch_left_out,
    a_loss_for_each_row,
    a_weight_that_is_no_number,
    a_loss_without_a_graph,
    a_loss_divided_by_hand,
    zero_grad_in_the_loop,
    clipping_before_the_sum,
    a_weight_unfrozen_later,
    parameters_added_later,
    sparse_gradients,
    a_source_without_a_batch_size,
    other_arguments_for_a_source,
    no_total_for_a_function,
    a_checkpoint_of_another_model,
    a_buffer_that_cannot_be_stored,
)


def of_scripts() -> dict[str, list[Any]]:
    """Returns name -> the exit status of a script that does it, 0 where it warns, and the message."""
    found = {}
    with open_world(ParallelConfig(device="cpu", threads=1), detect()) as world:
        for mistake in SCRIPTS:
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                world.calls.reducing = None  # of the mistake before, which was survived
                try:
                    mistake(world, folder)
                    lines = dict.fromkeys(str(warning.message) for warning in caught if warning.filename == __file__)
                    status, said = 0, "\n".join(lines)
                except PacelineError as error:
                    status, said = error.exit_status, str(error)
            found[mistake.__name__] = [status, without_places(said, folder)]
    return found


# ---- recorded ----


def computed() -> dict[str, Any]:
    return {"commands": of_commands(), "scripts": of_scripts()}


def record() -> None:
    golden.store(FILE, computed())


# name -> why it is another one now, and the status and message of now
CHANGED: dict[str, tuple[str, int, str]] = {
    "bench loder": (
        "`bench loader` is a script, bench/loader.py (issue 50)",
        2,
        "error: there is no `paceline bench loder`; there are: link, scaling",
    ),
    "train": ("without any option it refused a horizon that was not given", 2, "usage: paceline train [options]"),
    "optimizer_made_before": (
        "an optimizer of a criterion's parameters was told nothing that helps",
        2,
        "SCRIPT:LINE: 4 of the optimizer's 4 parameters are not the model's: it was made before the model was moved, "
        "wrapped, tied or loaded with new parameters. Make the optimizer after that, from model.parameters(). If they "
        "are of another module, such as a criterion, put both into one nn.Module",
    ),
}
# Parts of messages that say the same in plainer English now (issue 43): as recorded -> as they are.
REWORDED = {
    "--help` lists all": "--help all` lists all",
    "or say requires_grad_(False)": "or call requires_grad_(False)",
    "say `model.to(world.device)` first": "call `model.to(world.device)` first",
    "say step.backward(loss) for loss.backward(), and requires_grad_(False) for a model that another loss only "
    "passes through": "replace loss.backward() by step.backward(loss), and call requires_grad_(False) on a model that "
    "a loss only passes through",
    "say more=True to all but the last of several losses, or add them up; and call": "pass more=True to all losses of "
    "a micro-batch but the last, or add them up; call",
    "take that division away, or the gradient is that much too small": "remove that division, or the gradient is too "
    "small by that factor",
    "the sum over ranks: take zero_grad() and clip_grad_norm_() away, step.finish(max_norm=...) clips and clears "
    "gradients. To read or change them yourself call": "the sum over ranks. Remove zero_grad() and clip_grad_norm_(): "
    "step.finish(max_norm=...) does both. To read or change gradients call",
    "so no rank's gradient of it would reach another: say requires_grad_(True) before, or make optimizer and Replica "
    "anew": "so its gradient would not be summed over ranks: call requires_grad_(True) before, or make optimizer and "
    "Replica again",
    "so no rank's gradient of them would reach another: make optimizer and Replica anew after the model was changed": (
        "so their gradients would not be summed over ranks: make optimizer and Replica again after changing the model"
    ),
    "say sparse=False to the embedding": "set sparse=False on the embedding",
    "missing is no data set": "missing is not a dataset",
    "no data set is given": "no dataset is given",
    "bytes, train:VOCAB, gpt2, gpt-neox, llama3, qwen2.5, qwen3, smollm2": "bytes, chars, train:VOCAB, gpt2",
    "--node-rank belongs to a list of hosts; give it by --hosts": "--node-rank needs a list of hosts: --hosts",
}


def in_plainer_words(message: str) -> str:
    for recorded, now in REWORDED.items():
        message = message.replace(recorded, now)
    return message


def test_mistakes_are_answered_as_recorded() -> None:
    recorded, now = golden.load(FILE), computed()
    assert sum(map(len, recorded.values())) >= 65
    for table, before in recorded.items():
        assert list(now[table]) == list(before)
        for name, answer in before.items():
            status, message = answer
            expected = list(CHANGED[name][1:]) if name in CHANGED else [status, in_plainer_words(message)]
            assert now[table][name] == expected, name
