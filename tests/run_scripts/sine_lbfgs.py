"""Sine waves learned by LSTM cells, in the way of PyTorch's example: LBFGS calls a closure several times."""

import torch
from torch import nn

STEPS, WAVES, LENGTH, HIDDEN = 5, 3, 12, 8


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, HIDDEN)
        self.lstm2 = nn.LSTMCell(HIDDEN, HIDDEN)
        self.linear = nn.Linear(HIDDEN, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t, c_t, h_t2, c_t2 = (torch.zeros(input.size(0), HIDDEN, dtype=torch.double) for _ in range(4))
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


def build():
    return Sequence().double()


def waves():
    phase = torch.tensor([[0.0], [0.7], [1.9], [2.4]], dtype=torch.double)
    return torch.sin(torch.arange(LENGTH + 1, dtype=torch.double) / 3 + phase)


def example_batch():
    return (waves()[1:, :-1],)


def main():
    torch.manual_seed(0)
    data = waves()
    input, target = data[1:, :-1], data[1:, 1:]
    test_input, test_target = data[:1, :-1], data[:1, 1:]
    seq = build()
    criterion = nn.MSELoss()
    optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4)
    for i in range(STEPS):
        closures = 0

        def closure():
            nonlocal closures
            closures += 1
            optimizer.zero_grad()
            loss = criterion(seq(input), target)
            print("loss:", loss.item().hex())
            loss.backward()
            return loss

        optimizer.step(closure)
        print("step", i, "closures", closures)
        with torch.no_grad():
            pred = seq(test_input, future=4)
            print("test loss:", criterion(pred[:, :-4], test_target).item().hex())
    torch.save(seq.state_dict(), "sequence.pt")


if __name__ == "__main__":
    main()
