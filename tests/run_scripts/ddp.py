"""DistributedDataParallel under torchrun, on gloo: a sampler for each rank, rank 0 prints and saves."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, SAMPLES, FEATURES = 2, 4, 40, 16


def build():
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 1))


def example_batch():
    return (torch.zeros(BATCH, FEATURES),)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"epoch {epoch} loss {(mean / dist.get_world_size()).item().hex()}")
    if rank == 0:
        torch.save(model.module.state_dict(), "ddp.pt")
        print("world", os.environ["WORLD_SIZE"])
    # A thread of gloo frees the tensors of the last collective and needs the GIL for it, which the end of DDP
    # holds while it waits for that thread: torch 2.13 then waits for ever.
    time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
