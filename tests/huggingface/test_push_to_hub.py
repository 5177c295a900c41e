"""push_to_hub and upload_folder: what arrives at the hub, whose calls are recorded here, loads as the folder does."""

import pytest
import torch

import fmoe_ext
from fmoe_ext import fmoefy, huggingface, lora
from tests.finetune.streamed_models import save, streamed
from tests.formats.format_models import MODELS, assert_equal_logits, load, logits, make
from tests.huggingface.huggingface_models import make_model

transformers = pytest.importorskip("transformers")
hub = pytest.importorskip("huggingface_hub")
REPOSITORY = "me/model"


class Hub:
    """The repository, a folder here; the calls of huggingface_hub that create one and commit files."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.created = folder, []
        monkeypatch.setattr(hub.HfApi, "create_repo", self.create_repo)
        monkeypatch.setattr(hub.HfApi, "create_commit", self.create_commit)
        monkeypatch.setattr("huggingface_hub.hf_api.is_xet_available", lambda: False)  # one commit
        monkeypatch.setattr(
            hub.HfApi, "_validate_yaml", lambda *_, **__: None
        )  # the head of a card, by the hub
        monkeypatch.setattr(
            hub.HfApi, "file_exists", lambda api, repo_id, name, **_: (folder / name).exists()
        )
        monkeypatch.setattr(hub.ModelCard, "load", self.load_card)

    def create_repo(self, repo_id, **options):
        self.created.append(repo_id)
        return hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(self, *, repo_id, operations, **options):
        assert repo_id == REPOSITORY
        for operation in operations:
            target = self.folder / operation.path_in_repo
            target.parent.mkdir(parents=True, exist_ok=True)
            with operation.as_file() as file:
                target.write_bytes(file.read())

    def load_card(self, name, **__):
        if not (self.folder / "README.md").exists():
            raise hub.errors.EntryNotFoundError("a new repository")
        return hub.ModelCard((self.folder / "README.md").read_text())


@pytest.fixture
def repository(tmp_path, monkeypatch):
    return Hub(tmp_path / "hub", monkeypatch)


def test_exported_folder_is_uploaded(repository, tmp_path):
    torch.manual_seed(0)
    model = fmoefy(make("llama"), 4, activation="swiglu", bias=False)
    fmoe_ext.export(model, tmp_path / "model", "mixtral")
    hub.upload_folder(repo_id=REPOSITORY, folder_path=tmp_path / "model")
    assert_equal_logits(load(repository.folder), logits(model))


def test_imported_model_arrives_in_its_own_format(repository):
    model = fmoe_ext.import_model(make("mixtral", **MODELS["mixtral"]))
    model.push_to_hub(REPOSITORY)
    assert_equal_logits(load(repository.folder), logits(model))


def test_fmoefied_model_arrives_and_is_loaded_bitwise(repository):
    torch.manual_seed(0)
    model = fmoefy(make("llama"), 4)
    model.push_to_hub(REPOSITORY)
    loaded = huggingface.from_pretrained(repository.folder)
    assert torch.equal(logits(loaded), logits(model))


def test_model_card_arrives_in_a_new_repository(repository):
    """Transformers alone uploads a card that names nothing; one that the repository has stays."""
    model = fmoe_ext.import_model(make("mixtral", **MODELS["mixtral"]))
    model.push_to_hub(REPOSITORY)
    card = repository.folder / "README.md"
    assert hub.ModelCard(card.read_text()).data.tags == ["fmoe_ext", "mixture-of-experts"]
    assert "| architecture | MixtralForCausalLM |" in card.read_text()
    card.write_text("---\nlicense: mit\n---\n# Mine\n")
    model.push_to_hub(REPOSITORY)
    assert card.read_text().startswith("---\nlicense: mit\n") and card.read_text().endswith("# Mine\n")


def test_adapters_arrive_beside_their_model(repository):
    peft = pytest.importorskip("peft")
    model = huggingface.use(make_model("Qwen3MoeForCausalLM", dtype=torch.float64))
    base = {name: value.clone() for name, value in model.state_dict().items()}
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["mlp.experts.down_proj"], init_lora_weights=False
    )
    model = lora.fuse(peft.get_peft_model(model, config))
    model.push_to_hub(REPOSITORY)
    plain = make_model("Qwen3MoeForCausalLM", dtype=torch.float64)
    plain.load_state_dict(base)
    loaded = peft.PeftModel.from_pretrained(plain, repository.folder)
    torch.testing.assert_close(logits(loaded), logits(model))


def test_streamed_model_is_refused_before_a_repository_is_made(repository, tmp_path):
    save(tmp_path / "model")
    with pytest.raises(RuntimeError, match="has no weights of experts to save"):
        streamed(tmp_path / "model").push_to_hub(REPOSITORY)
    assert repository.created == []


def refused_on_ranks():
    model = fmoefy(make("llama"), 4)
    with pytest.raises(RuntimeError, match=r"would upload from each of 2 ranks: call save_pretrained"):
        model.push_to_hub(REPOSITORY)


def test_push_from_several_ranks_is_refused(pool):
    pool.run(refused_on_ranks, world_size=2)
