"""A language model of LSTM layers on sentences of different lengths, padded to the longest of their batch."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

VOCABULARY, WIDTH, BATCH, STEPS, PAD = 40, 16, 4, 8, 0


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        output, _ = self.rnn(self.encoder(tokens))
        return self.decoder(output)


def build():
    return RNNModel()


def corpus():
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(5, 15, (STEPS, BATCH), generator=generator)
    return [
        pad_sequence(
            [torch.randint(1, VOCABULARY, (int(n),), generator=generator) for n in row],
            batch_first=True,
            padding_value=PAD,
        )
        for row in lengths
    ]


def example_batches():
    return [(sentences[:, :-1],) for sentences in corpus()]


def main():
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step, sentences in enumerate(corpus()):
        data, targets = sentences[:, :-1], sentences[:, 1:]
        optimizer.zero_grad()
        logits = model(data)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        print(f"batch {step} length {data.size(1)} loss {loss.item().hex()}")
    torch.save(model.state_dict(), "rnn.pt")


if __name__ == "__main__":
    main()
