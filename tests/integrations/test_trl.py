"""ForRL under the ecosystem's own training: TRL's SFTTrainer, accelerate, FSDP2. None of them moves a byte."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import zoo
from weights_tools.make_tiny import make_tiny
from zoo.common.engine import Engine
from zoo.common.registry import model_class
from zoo.common.rows import Rows
from zoo.common.training import ForRL
from zoo.qwen3 import Qwen3ForServing
from zoo.testing import LawBroken, assert_same_bytes

STEPS = 3
IDS = torch.randint(512, (40,), generator=torch.Generator().manual_seed(5))
STARTS = torch.tensor([0, 11, 40])


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("trl")
    path = Path(__file__).resolve().parents[2] / "examples" / "sft_trl.py"
    spec = importlib.util.spec_from_file_location("sft_trl", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("tiny")
    layers = {"qwen3": 2, "qwen3_moe": 2, "qwen3_5": 4, "glm5": 3}
    made = {arch: make_tiny(arch, folder / arch, layers=count) for arch, count in layers.items()}
    return lambda arch: made[arch]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No telemetry, and no warnings about settings that TRL itself chose."""
    monkeypatch.setenv("CI", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load(path: Path) -> Any:
    return zoo.load(path, role="rl", device="cpu")


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


class TestSFTTrainer:
    def trained(self, example: ModuleType, path: Path, work: Path, texts: list[str] | None = None, **settings: Any) -> Any:
        model = load(path)
        trainer = example.trainer_of(model, path, texts or example.SENTENCES, work, disable_tqdm=True, max_steps=STEPS, **settings)
        trainer.train()
        return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    @pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
    def test_trains_saves_and_scores_the_same_bytes_again(
        self, example: ModuleType, checkpoints: Callable[[str], Path], tmp_path: Path, arch: str
    ) -> None:
        before = load(checkpoints(arch)).score(IDS, STARTS)
        model, losses = self.trained(example, checkpoints(arch), tmp_path / "trl")
        assert len(losses) == STEPS and losses[-1] < 0.7 * losses[0]
        model.save_pretrained(tmp_path / "out")
        scored = model.score(IDS, STARTS)
        assert_same_bytes(load(tmp_path / "out").score(IDS, STARTS), scored)
        assert_same_bytes(served(tmp_path / "out"), scored)
        with pytest.raises(LawBroken):  # the control: it did learn
            assert_same_bytes(before, scored)

    def test_checkpointing_and_padding_do_not_matter(self, example: ModuleType, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
        """Weights after three steps: recomputed or not, padded or packed without padding, under TRL's default autocast."""
        ways: dict[str, dict[str, Any]] = {
            "plain": {"activation_checkpointing": False},
            "checkpointed": {"activation_checkpointing": True},
            "padding-free": {"activation_checkpointing": True, "padding_free": True, "max_length": None},
            "mixed precision": {"activation_checkpointing": True, "bf16": True},
        }
        done = {name: self.trained(example, checkpoints("qwen3"), tmp_path / name, **way) for name, way in ways.items()}
        for name, (model, losses) in done.items():
            assert_same_bytes(weights(model), weights(done["plain"][0]), name)
            assert losses == done["plain"][1] and model.gradient_checkpointing == ways[name]["activation_checkpointing"]
        other, _ = self.trained(example, checkpoints("qwen3"), tmp_path / "control", learning_rate=1.1e-3)
        with pytest.raises(LawBroken):
            assert_same_bytes(weights(other), weights(done["plain"][0]))

    def test_its_loss_is_the_mean_of_minus_score(self, example: ModuleType, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
        model = load(checkpoints("qwen3"))
        trainer = example.trainer_of(model, checkpoints("qwen3"), example.SENTENCES, tmp_path, max_steps=1)
        batch = next(iter(trainer.get_train_dataloader()))
        loss = trainer.compute_loss(trainer.model, batch)
        keep = batch["attention_mask"].bool()
        starts = nn.functional.pad(keep.sum(1).cumsum(0), (1, 0))
        ids = batch["input_ids"][keep]
        assert_same_bytes(loss, -model.score(ids, starts).sum() / (len(ids) - len(keep)))
        with pytest.raises(LawBroken):
            assert_same_bytes(loss, -model.score(ids, starts[[0, -1]]).sum() / (len(ids) - len(keep)))


def test_the_script_runs(example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["sft_trl.py", "--steps", "2", "--out", str(tmp_path / "out")])
    example.main()
    assert "saved, loaded again, scored: the same bytes" in capsys.readouterr().out
    assert (tmp_path / "out" / "config.json").exists()


def test_a_folder_that_can_t_be_written_is_refused_before_training(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def began(*_: object) -> None:
        raise RuntimeError("began")

    monkeypatch.setattr(example, "make_tiny", began)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("kept")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name, why in (("full", "exists and is not an empty folder"), ("link", "is a symbolic link"), ("full/kept.txt/out", "is no folder")):
        monkeypatch.setattr("sys.argv", ["sft_trl.py", "--out", str(tmp_path / name)])
        with pytest.raises(SystemExit) as ended:
            example.main()
        said = capsys.readouterr().err
        assert ended.value.code == 2 and said.startswith("error: --out: ") and why in said and said.count("\n") == 1
    monkeypatch.setattr("sys.argv", ["sft_trl.py", "--out", str(tmp_path / "absent")])
    with pytest.raises(RuntimeError, match="began"):  # the control
        example.main()


def served(path: Path) -> Tensor:
    """Log-probabilities of IDS from the serving twin, 0.0 on last rows as `score` has them."""
    server = Qwen3ForServing.from_pretrained(path, device="cpu")
    memory = server.make_memory(8, 16)
    table = memory.table([[1], [2, 3]], [0, 0], 2)
    hidden = server.prefill(IDS, Rows.packed(STARTS), memory, table)
    return server.log_prob(hidden, IDS.roll(-1)).index_fill(0, STARTS[1:] - 1, 0.0)


class TestAccelerate:
    @pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
    def test_a_prepared_step_is_a_plain_step(self, checkpoints: Callable[[str], Path], arch: str) -> None:
        def step(prepare: bool, rate: float = 1e-3) -> tuple[Tensor, dict[str, Tensor]]:
            model = load(checkpoints(arch))
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
            accelerator = accelerate.Accelerator(cpu=True)
            wrapped = model
            if prepare:
                wrapped, optimizer = accelerator.prepare(model, optimizer)
            loss = wrapped(IDS, cu_seqlens=STARTS, labels=IDS).loss
            accelerator.backward(loss) if prepare else loss.backward()
            optimizer.step()
            return loss, weights(accelerator.unwrap_model(wrapped))

        assert_same_bytes(step(True), step(False))
        with pytest.raises(LawBroken):
            assert_same_bytes(step(True, 2e-3)[1], step(False)[1])

    def test_checkpointing_gives_the_same_loss(self, checkpoints: Callable[[str], Path]) -> None:
        model = accelerate.Accelerator(cpu=True).prepare(load(checkpoints("qwen3")))
        plain = model(IDS, cu_seqlens=STARTS, labels=IDS).loss
        model.gradient_checkpointing_enable()
        assert_same_bytes(model(IDS, cu_seqlens=STARTS, labels=IDS).loss, plain)
        with pytest.raises(LawBroken):
            assert_same_bytes(model(IDS.flip(0), cu_seqlens=STARTS, labels=IDS.flip(0)).loss, plain)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TestFSDP2:
    """One rank over gloo: the wrapping, not the traffic."""

    @pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe", "qwen3_5", "glm5"])
    @pytest.mark.parametrize("checkpointing", [False, True])
    @pytest.mark.parametrize("kind", ["no layers", "every unit", "mixed precision"])
    def test_sharded_is_whole(self, checkpoints: Callable[[str], Path], one_rank: None, arch: str, checkpointing: bool, kind: str) -> None:
        calls: tuple[Callable[[ForRL], Tensor], ...] = (
            lambda m: m(IDS, cu_seqlens=STARTS, labels=IDS).loss,
            lambda m: -m.score(IDS, STARTS).mean(),
            lambda m: m.score(IDS, STARTS, entropy=True, top_k=3).entropy_R.mean(),
        )
        for call in calls:
            plain = load(checkpoints(arch))
            model = load(checkpoints(arch))
            mesh = init_device_mesh("cpu", (1,))
            layers = set(model.model.layers)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for unit in model.sharding_units():
                if kind == "no layers" and unit in layers:
                    continue
                narrow = all(p.dtype == torch.bfloat16 for p in unit.parameters() if not isinstance(p, DTensor))
                fully_shard(unit, mesh=mesh, **({"mp_policy": policy} if kind == "mixed precision" and narrow else {}))
            register_fsdp_forward_method(model, "score")
            assert all(isinstance(p, DTensor) for p in model.parameters())
            if checkpointing:
                model.gradient_checkpointing_enable()
            found = call(model)
            expected = call(plain)
            assert_same_bytes(found, expected)
            found.backward()
            expected.backward()
            gradients = {name: p.grad for name, p in model.named_parameters()}
            assert all(isinstance(gradients[name], DTensor) == p.requires_grad for name, p in model.named_parameters())
            assert_same_bytes(
                {name: None if gradient is None else gradient.full_tensor() for name, gradient in gradients.items()},
                {name: p.grad for name, p in plain.named_parameters()},
            )
        assert_same_bytes(model(IDS, cu_seqlens=STARTS).logits, plain(IDS, cu_seqlens=STARTS).logits)
        with torch.no_grad():
            plain.model.layers[1].input_norm.weight[3] += 0.25
        with pytest.raises(LawBroken):
            assert_same_bytes(model.score(IDS, STARTS), plain.score(IDS, STARTS))

    @pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe", "qwen3_5", "glm5"])
    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            ({"param_dtype": torch.float32}, r"embed.weight is torch.float32, program 'aligned' needs torch.bfloat16"),
            ({"param_dtype": torch.float16, "cast_forward_inputs": False}, "embed.weight is torch.float16"),
            ({"param_dtype": torch.float64}, "embed.weight is torch.float64"),
            ({"output_dtype": torch.bfloat16}, "would cast what the model returns, FP32 .* to torch.bfloat16: shard with a Mixed"),
            ({"output_dtype": torch.float32}, r"would cast what (the model returns|model\.\S+ hands on).* to torch.float32: shard"),
            # accelerate's for bf16
            (dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), torch.bfloat16), "would cast what .* to torch.bfloat16"),
        ],
    )
    def test_a_policy_that_would_move_bytes_is_refused(
        self, checkpoints: Callable[[str], Path], one_rank: None, arch: str, policy: dict[str, Any], message: str
    ) -> None:
        def sharded(layers: MixedPrecisionPolicy, model: MixedPrecisionPolicy) -> Any:
            made = load(checkpoints(arch))
            for unit in made.sharding_units():
                fully_shard(unit, mesh=init_device_mesh("cpu", (1,)), mp_policy=model if unit is made else layers)
            register_fsdp_forward_method(made, "score")
            return made

        given = MixedPrecisionPolicy(**policy)
        none = MixedPrecisionPolicy()
        calls: tuple[Callable[[Any], object], ...] = (
            lambda m: m.score(IDS, STARTS),
            lambda m: m.score(IDS, STARTS, entropy=True),
            lambda m: m(IDS, cu_seqlens=STARTS, labels=IDS),
        )
        for call in calls:
            with pytest.raises(ValueError, match=message):
                call(sharded(given, given))
        # of layers alone: their weights are read, and hand on, what the model's own check can't see
        if given.param_dtype is not None and given.output_dtype is None:
            with pytest.raises(ValueError, match=rf"^rms_norm: \w+ is {given.param_dtype}, program 'aligned' reads torch.bfloat16"):
                sharded(given, none).score(IDS, STARTS)
        if given.output_dtype == torch.float32:
            with pytest.raises(ValueError, match=r"would cast what model\.\S+ hands on, to torch.float32"):
                sharded(given, none).score(IDS, STARTS)
        assert_same_bytes(sharded(none, none).score(IDS, STARTS), load(checkpoints(arch)).score(IDS, STARTS))

    @pytest.mark.parametrize(
        ("arch", "message"),
        [
            ("qwen3_5", r"delta_gate: a_log_V is torch.bfloat16, program 'aligned' reads torch.float32"),
            ("glm5", r"biased_route: (bias|logits)_R?X is torch.bfloat16, program 'aligned' reads torch.float32"),
        ],
    )
    @pytest.mark.parametrize("cast_inputs", [True, False])
    def test_fp32_parameters_under_a_bf16_policy_are_refused(
        self, checkpoints: Callable[[str], Path], one_rank: None, arch: str, message: str, cast_inputs: bool
    ) -> None:
        model = load(checkpoints(arch))
        for unit in model.sharding_units():
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast_inputs)
            fully_shard(unit, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        register_fsdp_forward_method(model, "score")
        with pytest.raises(ValueError, match=message):
            model.score(IDS, STARTS)

    def test_sharded_weights_are_refused_by_name(self, checkpoints: Callable[[str], Path], one_rank: None) -> None:
        model = load(checkpoints("qwen3"))
        whole = load(checkpoints("qwen3"))
        weights = list(whole.published_tensors())
        version = whole.weights_version
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"^model\.\S+ is sharded over processes: load a state dict"):
            model.load_weights(weights)
        name, _ = weights[-1]
        sharded = next(p for p in model.parameters() if p.shape == weights[-1][1].shape)
        with pytest.raises(ValueError, match=f"{name} must be a dense tensor with data, whole on one device, not a sharded one"):
            whole.load_weights([weights[0], (name, sharded)])
        gathered = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        whole.load_state_dict(gathered)
        assert whole.weights_version == version

    @pytest.mark.parametrize("master_dtype", [None, torch.float32])
    def test_a_step_after_a_forward_without_autograd_is_seen(
        self, checkpoints: Callable[[str], Path], one_rank: None, master_dtype: Any
    ) -> None:
        """Such a forward leaves what the root gathered, which the step doesn't write."""
        plain, model = (zoo.load(checkpoints("qwen3"), device="cpu", master_dtype=master_dtype) for _ in range(2))
        for unit in model.sharding_units():
            fully_shard(unit, mesh=init_device_mesh("cpu", (1,)))
        register_fsdp_forward_method(model, "score")
        for each in (plain, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
            (-each.score(IDS, STARTS).mean()).backward()
            with torch.no_grad():
                before = each.score(IDS, STARTS)
            assert not isinstance(each.model.norm.weight, DTensor)
            optimizer.step()
        with torch.no_grad():
            assert_same_bytes(model.score(IDS, STARTS), plain.score(IDS, STARTS))
            assert not torch.equal(before, plain.score(IDS, STARTS))

    @pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe", "qwen3_5", "glm5"])
    def test_gathered_weights_are_published(self, checkpoints: Callable[[str], Path], one_rank: None, arch: str) -> None:
        trainer = load(checkpoints(arch))
        version = trainer.weights_version
        for unit in trainer.sharding_units():
            fully_shard(unit, mesh=init_device_mesh("cpu", (1,)))
        published = list(trainer.published_tensors())
        served: Any = model_class(trainer.config.to_hf(), "serving").from_config(trainer.config, seed=1, device="cpu")
        engine = Engine(served, pages=4, max_batch=1)
        assert engine.update_weights(published[:-1]) != version  # the control
        assert engine.update_weights(published) == version
