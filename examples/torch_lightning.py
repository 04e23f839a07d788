"""Lightning's Trainer over a model that is compiled within a budget."""

import logging
import tempfile
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mucudnn.torch as mt

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
backend = mt.backend(budget="6MiB")


class Classifier(lightning.LightningModule):
    """Ten classes of vectors."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Sequential(
            *(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU()),
            nn.Linear(512, 10),
        )
        self.model = torch.compile(layers, backend=backend, dynamic=False)
        self.losses = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


torch.manual_seed(0)
x, y = torch.randn(512, 64), torch.randint(0, 10, (512,))
module = Classifier()
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=10,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=512))
print(backend.plans[0])
print(f"loss {module.losses[0]:.3f} -> {module.losses[-1]:.3f}")
assert module.losses[-1] < module.losses[0]
assert backend.plans[0].peak_bytes <= 6 << 20
