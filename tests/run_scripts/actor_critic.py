"""DDPG in the way of CleanRL: actor, critic, target networks, a replay buffer, a random environment."""

import copy

import torch
from torch import nn

STEPS, BATCH, STATE, ACTION, WIDTH = 10, 8, 6, 2, 16
GAMMA, TAU = 0.99, 0.01


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc_mu = (
            nn.Linear(STATE, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, ACTION),
        )

    def forward(self, x):
        return torch.tanh(self.fc_mu(torch.relu(self.fc2(torch.relu(self.fc1(x))))))


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (
            nn.Linear(STATE + ACTION, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, x, a):
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(torch.cat([x, a], 1))))))


def build():
    return Actor(), QNetwork()


def example_batch():
    return torch.zeros(BATCH, STATE), torch.zeros(BATCH, ACTION)


def main():
    torch.manual_seed(0)
    actor, qf1 = build()
    target_actor, qf1_target = copy.deepcopy(actor), copy.deepcopy(qf1)
    q_optimizer = torch.optim.Adam(qf1.parameters(), lr=3e-4)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    replay = []
    obs = torch.randn(STATE)
    for global_step in range(STEPS + BATCH):
        with torch.no_grad():
            action = actor(obs.unsqueeze(0))[0] + 0.1 * torch.randn(ACTION)
        next_obs, reward = torch.randn(STATE), -(action**2).sum()
        replay.append((obs, action, reward, next_obs))
        obs = next_obs
        if len(replay) <= BATCH:
            continue
        picked = [replay[i] for i in torch.randint(len(replay), (BATCH,))]
        observations, actions, rewards, next_observations = map(torch.stack, zip(*picked, strict=True))
        with torch.no_grad():
            next_q = qf1_target(next_observations, target_actor(next_observations))
            target = rewards.unsqueeze(1) + GAMMA * next_q
        qf1_loss = nn.functional.mse_loss(qf1(observations, actions), target)
        q_optimizer.zero_grad()
        qf1_loss.backward()
        q_optimizer.step()
        actor_loss = -qf1(observations, actor(observations)).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        with torch.no_grad():
            for net, target_net in ((actor, target_actor), (qf1, qf1_target)):
                for param, target_param in zip(net.parameters(), target_net.parameters(), strict=True):
                    target_param.lerp_(param, TAU)
        print(f"step {global_step} q {qf1_loss.item().hex()} actor {actor_loss.item().hex()}")
    torch.save((actor.state_dict(), qf1.state_dict()), "ddpg.pt")


if __name__ == "__main__":
    main()
