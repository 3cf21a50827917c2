"""DCGAN in the way of PyTorch's example: two networks, two optimizers, three backward passes an iteration."""

import torch
from torch import nn

ITERATIONS, BATCH, NZ, NGF, NDF, SIZE = 8, 4, 16, 8, 8, 16


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NZ, NGF * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(NGF * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF * 2, NGF, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NGF),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, NDF, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(NDF, NDF * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NDF * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(NDF * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1)


def weights_init(m):
    if "Conv" in m.__class__.__name__:
        nn.init.normal_(m.weight, 0.0, 0.02)


def build():
    return Generator().apply(weights_init), Discriminator().apply(weights_init)


def example_batch():
    return torch.zeros(BATCH, NZ, 1, 1), torch.zeros(BATCH, 3, SIZE, SIZE)


def main():
    torch.manual_seed(0)
    netG, netD = build()
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for i in range(ITERATIONS):
        real = torch.rand(BATCH, 3, SIZE, SIZE) * 2 - 1
        netD.zero_grad()
        errD_real = criterion(netD(real), torch.ones(BATCH))
        errD_real.backward()
        fake = netG(torch.randn(BATCH, NZ, 1, 1))
        errD_fake = criterion(netD(fake.detach()), torch.zeros(BATCH))
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        errG = criterion(netD(fake), torch.ones(BATCH))
        errG.backward()
        optimizerG.step()
        errD = errD_real + errD_fake
        print(f"[{i}/{ITERATIONS}] Loss_D: {errD.item().hex()} Loss_G: {errG.item().hex()}")
    torch.save(netG.state_dict(), "netG.pth")
    torch.save(netD.state_dict(), "netD.pth")


if __name__ == "__main__":
    main()
