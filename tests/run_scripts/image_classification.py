"""Image classification in torchvision's way: bf16 autocast, a scheduler, an evaluation each epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, TRAIN_IMAGES, TEST_IMAGES = 3, 8, 64, 128


class SmallNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
        )
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(16, num_classes)

    def forward(self, x):
        return self.classifier(self.dropout(torch.flatten(self.features(x), 1)))


def build():
    return SmallNet()


def example_batch():
    return (torch.zeros(BATCH, 3, 16, 16),)


def train_one_epoch(model, criterion, optimizer, data_loader, epoch):
    model.train()
    for i, (image, target) in enumerate(data_loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch} batch {i} loss {loss.item().hex()} lr {optimizer.param_groups[0]['lr']!r}")


def evaluate(model, criterion, data_loader):
    model.eval()
    total, correct = 0.0, 0
    with torch.inference_mode():
        for image, target in data_loader:
            output = model(image)
            total += criterion(output, target).item() * len(target)
            correct += (output.argmax(1) == target).sum().item()
    print(f"test loss {total.hex()} correct {correct}/{TEST_IMAGES}")


def main():
    torch.manual_seed(0)
    train = TensorDataset(torch.randn(TRAIN_IMAGES, 3, 16, 16), torch.randint(10, (TRAIN_IMAGES,)))
    test = TensorDataset(torch.randn(TEST_IMAGES, 3, 16, 16), torch.randint(10, (TEST_IMAGES,)))
    train_loader = DataLoader(train, batch_size=BATCH, shuffle=True)
    test_loader = DataLoader(test, batch_size=BATCH)
    model = build()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for epoch in range(EPOCHS):
        train_one_epoch(model, criterion, optimizer, train_loader, epoch)
        lr_scheduler.step()
        evaluate(model, criterion, test_loader)
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": lr_scheduler.state_dict(),
            "epoch": epoch,
        }
        torch.save(checkpoint, f"model_{epoch}.pth")


if __name__ == "__main__":
    main()
