"""`XckptTrainer`: resumed runs, kept checkpoints, weights for `from_pretrained`, two processes."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import xckpt
from tests.integrations.conftest import damage, own_bytes, torchrun
from tests.support.ranks import Ranks

STEPS = 16
"""Of two epochs."""


def trained(
    folder: Path | str,
    plain: bool = False,
    resume: Any = None,
    stop: int = -1,
    callbacks: Any = (),
    **settings: Any,
) -> tuple[Any, list[torch.Tensor]]:
    """The trainer after a run of a small Llama with dropout, and its parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from xckpt.integrations.hugging_face import XckptTrainer

    torch.manual_seed(0)
    sizes: Any = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    config = LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=0.1)
    model = LlamaForCausalLM(config)
    tokens = [torch.randint(0, 32, (8,)) for _ in range(16)]
    data = [{"input_ids": each, "labels": each} for each in tokens]
    settings = {"save_steps": 5, "save_total_limit": 2, "logging_steps": 100} | settings
    settings |= {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4}
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2 // int(os.environ.get("WORLD_SIZE", "1")),
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_steps=stop,
        **settings,
    )
    kind: Any = Trainer if plain else XckptTrainer
    trainer = kind(
        model, arguments, train_dataset=data, eval_dataset=data[:2], callbacks=[*callbacks]
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("stop", [5, 8, 13])
def test_a_resumed_run_is_the_uninterrupted_one(stop: int, tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "whole", plain=True)
    trained(tmp_path / "run", stop=stop)
    path = tmp_path / "run" / f"checkpoint-{stop}"
    assert xckpt.open(path).verify() == []
    # As if the run was killed right after the commit, or while the trainer's file was written.
    file = path / "trainer_state.json"
    file.unlink() if stop == 5 else file.write_text("{")
    trainer, resumed = trained(tmp_path / "run", resume=path if stop == 8 else True)
    assert trainer.state.global_step == STEPS
    assert all(map(torch.equal, whole, resumed))


class Adapted(torch.nn.Module):
    """An adapter beside a frozen model of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(1024, 1024).requires_grad_(False)
        self.adapter = torch.nn.Linear(1024, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.adapter(self.base(x)) - labels).square().mean()}


def test_a_frozen_model_is_written_once(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from xckpt.integrations.hugging_face import XckptTrainer

    data = [{"x": torch.randn(1024), "labels": torch.ones(1)} for _ in range(4)]
    settings: Any = {"save_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    for end in (2, 4):  # the second process resumes
        arguments = TrainingArguments(str(tmp_path), max_steps=end, **settings)
        XckptTrainer(Adapted(), arguments, train_dataset=data).train(end > 2)
    sizes = [own_bytes(tmp_path / f"checkpoint-{step}") for step in range(1, 5)]
    # The adapter, its two moments, the random state, and what the trainer notes.
    assert max(sizes) < 100_000 and xckpt.open(tmp_path / "checkpoint-1").verify() == []


def test_a_run_resumes_from_a_checkpoint_without_writing_to_it(tmp_path: Path) -> None:
    """It may be another user's."""
    trained(tmp_path / "run", stop=2, save_steps=2)
    path = tmp_path / "run" / "checkpoint-2"
    before = {each: each.stat().st_mtime_ns for each in path.rglob("*")}
    trained(tmp_path / "other", stop=3, resume=path)
    assert before == {each: each.stat().st_mtime_ns for each in path.rglob("*")}


def test_weights_alone_are_no_run_to_resume(tmp_path: Path) -> None:
    trained(tmp_path, stop=5, save_only_model=True)
    path = tmp_path / "checkpoint-5"
    said = re.escape(f"{path} was saved with save_only_model: it holds the model, but no state of")
    with pytest.raises(xckpt.TreeMismatchError, match=f"^{said} the optimizer.* new run") as caught:
        trained(tmp_path, resume=True)
    assert any((problem.leaf or "").startswith("optimizer/") for problem in caught.value.problems)
    trainer, _ = trained(tmp_path / "other", stop=1)
    xckpt.load_into(path, {"model": trainer.model})


def test_it_resumes_from_the_plain_trainer(tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "whole", plain=True)
    trained(tmp_path / "run", plain=True, stop=10)
    _, resumed = trained(tmp_path / "run", resume=True)
    assert all(map(torch.equal, whole, resumed))


def test_a_damaged_newest_gives_way_to_the_one_before(tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "whole", plain=True)
    trained(tmp_path / "run", stop=15, save_total_limit=None)
    damage(tmp_path / "run" / "checkpoint-15")
    (tmp_path / "run" / "checkpoint-10" / "xckpt.json").unlink()
    with pytest.raises(xckpt.CorruptCheckpointError):  # a path names one and no other
        trained(tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-15"))
    with pytest.warns(
        UserWarning, match=r"checkpoint-5 was restored.*checkpoint-15.*checkpoint-10"
    ):
        trainer, resumed = trained(tmp_path / "run", resume=True)
    assert trainer.state.global_step == STEPS and all(map(torch.equal, whole, resumed))
    assert xckpt.open(tmp_path / "run" / "checkpoint-15").verify() == []


def test_a_newest_that_was_never_finished_gives_way_too(tmp_path: Path) -> None:
    """The plain trainer was killed in its save."""
    trained(tmp_path, plain=True, stop=10)
    (tmp_path / "checkpoint-15").mkdir()
    shutil.copy(tmp_path / "checkpoint-10" / "model.safetensors", tmp_path / "checkpoint-15")
    with pytest.warns(UserWarning, match="checkpoint-10 was restored.*checkpoint-15.*no trainer_s"):
        trainer, _ = trained(tmp_path, resume=True)
    assert trainer.state.global_step == STEPS


@pytest.mark.parametrize("kind", ["deepspeed", "fsdp"])
def test_what_others_have_sharded_is_left_to_the_trainer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    trainer, _ = trained(tmp_path, stop=5)
    asked: list[Any] = []
    monkeypatch.setattr(Trainer, "_save_checkpoint", lambda _, *arguments: asked.append(arguments))
    setattr(trainer, f"is_{kind}_enabled", True)  # of FSDP the first: the second is not
    trainer._save_checkpoint(trainer.model, None)
    assert asked == [(trainer.model, None)]


def test_what_was_just_saved_stays_behind_a_damaged_newer_one(tmp_path: Path) -> None:
    trained(tmp_path, stop=15, save_total_limit=None)
    damage(tmp_path / "checkpoint-15")
    with pytest.warns(UserWarning, match="checkpoint-10 was restored"):
        trained(tmp_path, resume=True, stop=12, save_steps=4, save_total_limit=1)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-12", "checkpoint-15"]
    with pytest.warns(UserWarning, match="checkpoint-12 was restored"):
        trained(tmp_path, resume=True, save_total_limit=1)
    assert os.listdir(tmp_path) == ["checkpoint-16"]


def test_where_all_are_damaged_no_run_begins_anew(tmp_path: Path) -> None:
    trained(tmp_path, stop=10)
    for name in ("checkpoint-5", "checkpoint-10"):
        damage(tmp_path / name)
    with pytest.raises(xckpt.CorruptCheckpointError, match="no checkpoint is good"):
        trained(tmp_path, resume=True)


def test_callbacks_go_on_where_they_were(tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback

    rules: Any = {"eval_strategy": "steps", "eval_steps": 5, "metric_for_best_model": "eval_loss"}
    rules |= {"load_best_model_at_end": True, "learning_rate": 0.0}
    rules |= {"restore_callback_states_from_checkpoint": True}
    stopping = [EarlyStoppingCallback(early_stopping_patience=3)]
    trained(tmp_path, stop=10, callbacks=stopping, **rules)
    again = [EarlyStoppingCallback(early_stopping_patience=9)]
    trainer, _ = trained(tmp_path, resume=True, stop=11, callbacks=again, **rules)
    [found] = [
        each
        for each in trainer.callback_handler.callbacks
        if isinstance(each, EarlyStoppingCallback)
    ]
    assert found.early_stopping_patience == 3 and found.early_stopping_patience_counter >= 1


def test_callbacks_of_one_class_have_a_state_each(tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback

    rules: Any = {"eval_strategy": "steps", "eval_steps": 5, "metric_for_best_model": "eval_loss"}
    rules |= {"load_best_model_at_end": True, "restore_callback_states_from_checkpoint": True}
    trained(tmp_path, stop=10, callbacks=[EarlyStoppingCallback(n) for n in (3, 4)], **rules)
    state = json.loads((tmp_path / "checkpoint-10" / "trainer_state.json").read_text())
    found = state["stateful_callbacks"]["EarlyStoppingCallback"]
    assert [each["args"]["early_stopping_patience"] for each in found] == [3, 4]


@pytest.mark.parametrize("limit, left", [(1, [16]), (2, [15, 16]), (None, [5, 10, 15, 16])])
def test_it_keeps_what_the_trainer_keeps(
    limit: int | None, left: list[int], tmp_path: Path
) -> None:
    trained(tmp_path, save_total_limit=limit)
    assert sorted(os.listdir(tmp_path)) == sorted(f"checkpoint-{step}" for step in left)


def test_the_best_is_kept_and_loaded_at_the_end(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    best |= {"eval_strategy": "steps", "eval_steps": 5, "learning_rate": 1.0}
    trainer, _ = trained(tmp_path, save_total_limit=1, **best)
    step = trainer.state.best_global_step
    # At the end this trainer removes even the newest, if it is not the best.
    assert step < STEPS and os.listdir(tmp_path) == [f"checkpoint-{step}"]
    model = {"model": {name: t.clone() for name, t in trainer.model.state_dict().items()}}
    xckpt.load_into(tmp_path / f"checkpoint-{step}", model, unexpected="ignore")
    assert all(map(torch.equal, trainer.model.state_dict().values(), model["model"].values()))


def test_a_best_step_that_was_not_saved_is_none(tmp_path: Path) -> None:
    """It is evaluated twice as often as it is saved."""
    rules = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    rules |= {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 4, "learning_rate": 0.05}
    found: list[Any] = []
    for name in ("plain", "ours"):
        trainer, _ = trained(tmp_path / name, plain=name == "plain", **rules)
        best, state = Path(trainer.state.best_model_checkpoint), trainer.state
        assert best.is_dir() and state.best_global_step % 4 == 2
        found.append((state.best_global_step, best.name, sorted(os.listdir(tmp_path / name))))
    assert found[0] == found[1]


def test_a_damaged_best_is_an_error_at_the_end_and_the_newest_stays(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Damages(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == STEPS:
                for file in Path(state.best_model_checkpoint).rglob("*"):
                    if file.is_file() and file.suffix == "":  # a chunk, or a pack
                        damaged = bytes(byte ^ 1 for byte in file.read_bytes())
                        file.unlink()  # others may share it
                        file.write_bytes(damaged)

    best: Any = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    best |= {"eval_strategy": "steps", "eval_steps": 5, "learning_rate": 1.0}
    # At this rate the loss goes up and down, not alike on all processors.
    with pytest.raises(xckpt.CorruptCheckpointError, match=rf"checkpoint-(?!{STEPS}/)\d+"):
        trained(tmp_path, save_total_limit=1, callbacks=[Damages()], **best)
    assert xckpt.open(tmp_path / f"checkpoint-{STEPS}").verify() == []


def test_a_failed_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-10").write_text("in the way")
    with pytest.raises(xckpt.XckptError):
        trained(tmp_path, save_total_limit=1)
    assert xckpt.open(tmp_path / "checkpoint-5").verify() == []


def test_the_weights_go_to_from_pretrained(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from xckpt.integrations.hugging_face import save_pretrained

    _, parameters = trained(tmp_path / "run", stop=5)
    save_pretrained(str(tmp_path / "run" / "checkpoint-5"), str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.attention_dropout == 0.1
    assert all(map(torch.equal, model.parameters(), parameters))


def test_weights_of_a_model_without_a_configuration_and_of_no_trainer(tmp_path: Path) -> None:
    from xckpt.integrations.hugging_face import save_pretrained

    run, out = tmp_path / "run", tmp_path / "out"
    for text in ("it does not exist", "was not saved by XckptTrainer"):
        with pytest.raises(xckpt.NotACheckpointError, match=text):
            save_pretrained(str(run), str(out))
        assert not out.exists()
        xckpt.save(run, {"model": {"w": torch.ones(2)}}, overwrite=True)
    notes = {"trainer_state": "{}", "config": None}
    xckpt.save(run, {"model": {"w": torch.ones(2)}}, overwrite=True, metadata=notes)
    save_pretrained(str(run), str(out))
    assert [each.name for each in out.iterdir()] == ["model.safetensors"]


def saved_by_a_trainer(model: torch.nn.Module, folder: Path) -> str:
    """The checkpoint that a trainer of this model saves."""
    from transformers import TrainingArguments

    from xckpt.integrations.hugging_face import XckptTrainer

    arguments = TrainingArguments(str(folder), use_cpu=True, report_to=[], save_only_model=True)
    trainer = XckptTrainer(model, arguments)
    trainer._save_checkpoint(model, None)
    return str(folder / "checkpoint-0")


def test_how_a_model_generates_goes_to_from_pretrained(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config

    from xckpt.integrations.hugging_face import save_pretrained

    config = GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=1)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = [2, 7]
    save_pretrained(saved_by_a_trainer(model, tmp_path), str(tmp_path / "out"))
    found: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.generation_config.eos_token_id == [2, 7]


def test_a_model_of_the_users_may_have_a_configuration_of_its_own(tmp_path: Path) -> None:
    from xckpt.integrations.hugging_face import save_pretrained

    class Scaled(torch.nn.Linear):
        config = argparse.Namespace(scale=2)

    save_pretrained(saved_by_a_trainer(Scaled(2, 1), tmp_path), str(tmp_path / "out"))
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


@pytest.mark.parametrize("name", ["base_model.model.w", "q.base_layer.weight"])
def test_weights_with_adapters_are_refused(name: str, tmp_path: Path) -> None:
    """`from_pretrained` reads such names as none of its own, and begins with random weights."""
    from xckpt.integrations.hugging_face import save_pretrained

    notes: Any = {"trainer_state": "{}", "config": "{}"}
    xckpt.save(tmp_path / "run", {"model": {name: torch.ones(2)}}, metadata=notes)
    with pytest.raises(xckpt.UnsupportedLeafError, match=rf"PEFT \(model/{name}\).*load_into"):
        save_pretrained(str(tmp_path / "run"), str(tmp_path / "out"))
    assert os.listdir(tmp_path) == ["run"]


def test_an_output_folder_that_is_a_url_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the trainer makes the folder `memory:/run` before it calls back
    for url in ("memory://run", "s3://bucket/run"):
        with pytest.raises(xckpt.PathError, match=f"output_dir='{url}'.*local folder"):
            trained(url)


def test_weights_go_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xckpt.integrations.hugging_face import save_pretrained

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    notes: Any = {"trainer_state": "{}", "config": "{}"}
    xckpt.save("run", {"model": {"w": torch.ones(2)}}, metadata=notes)
    for folder in ("~/out", f"file://{tmp_path}/home/other"):
        save_pretrained("run", folder)
        name = folder.rpartition("/")[2]
        found = sorted(os.listdir(tmp_path / "home" / name))
        assert found == ["config.json", "model.safetensors"]
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "config.json").mkdir(parents=True)
    refused = {"file": "file lies where", "file/below": "above it is a file"}
    refused |= {"taken": r"config\.json: Is a directory", "memory://out": "local file systems only"}
    for folder, text in refused.items():
        with pytest.raises(xckpt.StorageError, match=text):
            save_pretrained("run", folder)
    wrong: Any = 5
    with pytest.raises(TypeError, match=r"save_pretrained\(checkpoint, folder\)"):
        save_pretrained("run", wrong)
    assert sorted(os.listdir(tmp_path)) == ["file", "home", "run", "taken"]


def on_rank_train(rank: int, folder: str, plain: bool, resume: Any, stop: int) -> Any:
    torchrun(rank)
    trainer, parameters = trained(folder, plain, resume, stop)
    return trainer.args.world_size, parameters


def test_two_processes_resume(two_ranks: Ranks, tmp_path: Path) -> None:
    whole = two_ranks.run(on_rank_train, str(tmp_path / "whole"), True, None, -1)
    two_ranks.run(on_rank_train, str(tmp_path / "run"), False, None, 10)
    resumed = two_ranks.run(on_rank_train, str(tmp_path / "run"), False, True, -1)
    assert [size for size, _ in resumed] == [2, 2]
    damage(tmp_path / "run" / "checkpoint-16")
    resumed = two_ranks.run(on_rank_train, str(tmp_path / "run"), False, True, -1)
    for (_, once), (_, again) in zip(whole, resumed, strict=True):
        assert all(map(torch.equal, once, again))


def on_rank_resume(rank: int, folders: list[str]) -> Any:
    torchrun(rank)
    with contextlib.chdir(folders[rank]):
        return trained("run", resume="run/checkpoint-2")


def test_a_host_that_does_not_see_the_checkpoint_is_an_error_on_all(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """Not a rank that takes it for one of the plain trainer, and another that waits for it."""
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for folder in folders:
        folder.mkdir()
    trained(folders[0] / "run", stop=2, save_steps=2)
    for is_done, said in two_ranks.attempt(on_rank_resume, [*map(str, folders)]):
        assert not is_done and "host1/run/checkpoint-2" in said and "xckpt.errors." in said
