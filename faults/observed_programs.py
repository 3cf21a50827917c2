"""THE table: training scripts that notice a step that runs otherwise, or twice, because it is watched.

Each begins with `from faults.observed_loop import *` and the seeds, and ends with `finish()`.
"""

from __future__ import annotations

PROGRAMS: dict[str, str] = {}


def _add(**programs: str) -> None:
    for name, text in programs.items():
        words = name.replace("_", " ")
        assert words not in PROGRAMS
        PROGRAMS[words] = text


# State of the program that forward reads and changes.
_add(
    global_numpy_generator="""
rng = np.random.default_rng(0)
class Model(Net):
    def middle(self, x): return x * float(rng.random())
train(Model()); note(rng.bit_generator.state)
""",
    global_numpy_legacy_generator="""
class Model(Net):
    def middle(self, x): return x * np.random.rand()
train(Model())
""",
    global_python_generator="""
rng = random.Random(7)
class Model(Net):
    def middle(self, x): return x * rng.random()
train(Model()); note(rng.random())
""",
    module_random="""
class Model(Net):
    def middle(self, x): return x if random.random() < 0.5 else x * 2
train(Model(), steps=8)
""",
    global_torch_generator="""
generator = torch.Generator().manual_seed(3)
class Model(Net):
    def middle(self, x): return x * torch.rand(x.shape, generator=generator)
train(Model()); note(generator.get_state().sum().item())
""",
    dropout_by_the_default_generator="""
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
train(model)
""",
    seed_set_inside_forward="""
class Model(Net):
    def middle(self, x):
        torch.manual_seed(int(x.abs().sum().item() * 1000))
        return nn.functional.dropout(x, 0.3)
train(Model())
""",
    iterator_in_forward="""
scales = iter([0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
class Model(Net):
    def middle(self, x): return x * next(scales)
train(Model()); note(list(scales))
""",
    itertools_cycle_and_count="""
import itertools
cycle, count = itertools.cycle([1.0, 2.0, 3.0]), itertools.count()
class Model(Net):
    def middle(self, x): return x * next(cycle) + next(count)
train(Model()); note(next(cycle), next(count))
""",
    generator_function_in_forward="""
def scales():
    value = 1.0
    while True:
        value = value * 1.5 % 3
        received = yield value
        value += received or 0
source = scales(); next(source)
class Model(Net):
    def middle(self, x): return x * source.send(0.25)
train(Model()); note(next(source))
""",
    counter_as_a_global="""
calls = 0
class Model(Net):
    def middle(self, x):
        global calls
        calls += 1
        return x * calls
train(Model()); note(calls)
""",
    counter_as_an_attribute="""
class Model(Net):
    calls = 0
    def middle(self, x):
        self.calls += 1
        return x * self.calls
model = Model(); train(model); note(model.calls, Model.calls)
""",
    counter_as_a_class_attribute="""
class Model(Net):
    calls = 0
    def middle(self, x):
        type(self).calls += 1
        return x * type(self).calls
train(Model()); note(Model.calls)
""",
    counter_in_a_closure="""
def counter():
    n = 0
    def up():
        nonlocal n
        n += 1
        return n
    return up
up = counter()
class Model(Net):
    def middle(self, x): return x * up()
train(Model()); note(up())
""",
    counter_as_a_default_argument="""
class Model(Net):
    def middle(self, x, seen=[]):
        seen.append(1)
        return x * len(seen)
train(Model()); note(len(Model.middle.__defaults__[0]))
""",
    counter_as_a_function_attribute="""
def scale(): scale.calls += 1; return scale.calls
scale.calls = 0
class Model(Net):
    def middle(self, x): return x / scale()
train(Model()); note(scale.calls)
""",
    counter_in_a_slot="""
class Box:
    __slots__ = ("n",)
box = Box(); box.n = 0
class Model(Net):
    def middle(self, x):
        box.n += 1
        return x * box.n
train(Model()); note(box.n)
""",
    counter_in_another_module="""
import types
other = types.ModuleType("other_module_of_the_program"); other.n = 0
sys.modules[other.__name__] = other
class Model(Net):
    def middle(self, x):
        sys.modules["other_module_of_the_program"].n += 1
        return x * other.n
train(Model()); note(other.n)
""",
    counter_as_a_tensor="""
calls = torch.zeros(())
class Model(Net):
    def middle(self, x):
        calls.add_(1)
        return x * calls
train(Model()); note(calls.item())
""",
    counter_in_an_array="""
import array, ctypes
cells, number = array.array("d", [0.0]), ctypes.c_long(0)
class Model(Net):
    def middle(self, x):
        cells[0] += 1; number.value += 1
        return x * cells[0] + number.value
train(Model()); note(cells[0], number.value)
""",
    counter_in_shared_memory="""
import multiprocessing
value = multiprocessing.Value("i", 0)
class Model(Net):
    def middle(self, x):
        with value.get_lock(): value.value += 1
        return x * value.value
train(Model()); note(value.value)
""",
    counter_in_an_environment_variable="""
os.environ["CALLS_OF_FORWARD"] = "0"
class Model(Net):
    def middle(self, x):
        os.environ["CALLS_OF_FORWARD"] = str(int(os.environ["CALLS_OF_FORWARD"]) + 1)
        return x * int(os.environ["CALLS_OF_FORWARD"])
train(Model()); note(os.environ["CALLS_OF_FORWARD"])
""",
    dict_subclass="""
class Count(dict):
    def __missing__(self, key): return 0
    def __setitem__(self, key, value): note("set", key, value); super().__setitem__(key, value)
seen = Count()
class Model(Net):
    def middle(self, x):
        seen["calls"] += 1
        return x * seen["calls"]
train(Model()); note(dict(seen))
""",
    collections_counter_and_deque="""
import collections
seen, last = collections.Counter(), collections.deque([1.0, 2.0], maxlen=2)
class Model(Net):
    def middle(self, x):
        seen[x.shape[0]] += 1; last.append(last[0] + last[-1])
        return x * last[-1] + seen[x.shape[0]]
train(Model()); note(seen, last)
""",
    large_container="""
table = {n: float(n) for n in range(300_000)}; table["at"] = 0
class Model(Net):
    def middle(self, x):
        table["at"] += 1; table[table["at"]] *= 0.5
        return x * table[table["at"]]
train(Model()); note(table["at"], table[1], table[2], len(table))
""",
    deep_container="""
deep = at = []
for _ in range(500): at.append([]); at = at[0]
class Model(Net):
    def middle(self, x):
        at.append(1)
        return x * len(at)
train(Model()); note(len(at))
""",
    cache_by_shape="""
cache = {}
class Model(Net):
    def middle(self, x):
        if x.shape not in cache: cache[x.shape] = torch.rand(x.shape[-1])
        return x * cache[x.shape]
train(Model()); note(len(cache))
""",
    lru_cache="""
import functools
@functools.lru_cache(maxsize=2)
def scale(key): return float(torch.rand(()))
class Model(Net):
    n = 0
    def middle(self, x):
        self.n += 1
        return x * scale(self.n % 3)
train(Model(), steps=7); note(scale.cache_info())
""",
    weak_references="""
import weakref
class Box: pass
boxes, kept = weakref.WeakValueDictionary(), []
class Model(Net):
    def middle(self, x):
        box = Box(); boxes[len(kept)] = box; kept.append(box)
        weakref.finalize(box, note, "gone", len(kept))
        return x * len(boxes)
train(Model()); note(len(boxes)); kept.clear()
""",
    context_variable="""
import contextvars
scale = contextvars.ContextVar("scale", default=1.0)
class Model(Net):
    def middle(self, x):
        scale.set(scale.get() * 1.25)
        return x * scale.get()
train(Model()); note(scale.get())
""",
    thread_local="""
import threading
local = threading.local(); local.n = 0
class Model(Net):
    def middle(self, x):
        local.n += 1
        return x * local.n
train(Model()); note(local.n)
""",
    running_statistics="""
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
train(model); note(model[1].num_batches_tracked.item())
""",
    buffer_replaced_in_forward="""
class Model(Net):
    def __init__(self):
        super().__init__(); self.register_buffer("kept", torch.zeros(8))
    def middle(self, x):
        self.kept = self.kept * 0.9 + x.detach().mean(0)
        return x + self.kept
train(Model())
""",
    spectral_norm="""
model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
train(model)
""",
    enumeration_and_properties="""
class Meta(type):
    @property
    def next(cls): cls.n += 1; return cls.n
class Model(Net):
    def middle(self, x): return x * Numbers.next
class Numbers(metaclass=Meta): n = 0
train(Model()); note(Numbers.n)
""",
    memory_of_earlier_outputs="""
memory = []
class Model(Net):
    def middle(self, x):
        memory.append(x.detach())
        return x + sum(m.mean() for m in memory)
train(Model()); note(len(memory))
""",
    monotonic_identifier="""
class Ids:
    def __init__(self): self.n = 100
    def __call__(self): self.n += 1; return self.n
    def __deepcopy__(self, memo): note("copied"); return self
    def __reduce__(self): note("pickled"); return (Ids, ())
class Model(Net):
    def __init__(self): super().__init__(); self.ids = Ids()
    def middle(self, x): return x * self.ids()
model = Model(); train(model); note(model.ids.n)
""",
)

# Objects that own something outside of the process.
_add(
    scratch_folder_deleted_by_del="""
import shutil, tempfile
class Scratch:
    def __init__(self): self.path = tempfile.mkdtemp(dir=".")
    def __del__(self, rmtree=shutil.rmtree): rmtree(self.path)
class Model(Net):
    def __init__(self): super().__init__(); self.scratch = Scratch()
    def middle(self, x):
        path = os.path.join(self.scratch.path, "last.txt")
        with open(path, "a") as file: file.write("x")
        return x * os.path.getsize(path)
model = Model(); train(model); note(os.listdir(model.scratch.path)); shutil.rmtree(model.scratch.path)
model.scratch.path = os.path.abspath("none"); os.mkdir("none")
""",
    descriptor_closed_by_del="""
class Owner:
    def __init__(self): self.number = os.open("owned.txt", os.O_RDWR | os.O_CREAT)
    def __del__(self, close=os.close): close(self.number)
class Model(Net):
    def __init__(self): super().__init__(); self.owner = Owner()
    def middle(self, x):
        os.write(self.owner.number, b"x")
        return x * os.fstat(self.owner.number).st_size
train(Model())
""",
    del_that_counts="""
dropped = []
class Counted:
    def __del__(self): dropped.append(1)
class Model(Net):
    def __init__(self): super().__init__(); self.kept = Counted()
    def middle(self, x):
        Counted()
        return x * (1 + len(dropped))
train(Model()); note(len(dropped))
""",
    open_file_as_an_attribute="""
class Model(Net):
    def __init__(self): super().__init__(); self.file = open("lines.txt", "w")
    def middle(self, x):
        self.file.write(f"{x.shape}\\n"); self.file.flush()
        return x
model = Model(); train(model); model.file.close(); note(open("lines.txt").read().count("3"))
""",
    database_as_an_attribute="""
import sqlite3
class Model(Net):
    def __init__(self):
        super().__init__(); self.db = sqlite3.connect("calls.db")
        self.db.execute("create table t (n integer)")
    def middle(self, x):
        self.db.execute("insert into t values (1)")
        return x * self.db.execute("select count(*) from t").fetchone()[0]
model = Model(); train(model); note(model.db.execute("select count(*) from t").fetchone())
model.db.close(); os.remove("calls.db")
""",
    lock_and_socket_as_attributes="""
import socket, threading
class Model(Net):
    def __init__(self):
        super().__init__(); self.lock = threading.Lock(); self.a, self.b = socket.socketpair()
    def middle(self, x):
        with self.lock: self.a.send(b"x")
        return x * len(self.b.recv(10))
train(Model())
""",
    memory_map="""
import mmap
file = open("map.bin", "w+b"); file.write(bytes(16)); file.flush()
mapped = mmap.mmap(file.fileno(), 16)
class Model(Net):
    def middle(self, x):
        mapped[0] += 1
        return x * mapped[0]
train(Model()); mapped.flush(); note(mapped[0])
""",
    files_written_in_forward="""
class Model(Net):
    n = 0
    def middle(self, x):
        self.n += 1
        with open(f"activation_{self.n}.txt", "w") as file: file.write(repr(x.tolist()))
        return x
train(Model())
""",
    printing_in_forward="""
class Model(Net):
    def middle(self, x): print("forward", tuple(x.shape), round(x.sum().item(), 4)); return x
train(Model(), after=lambda step: print("step", step))
""",
    logging_in_forward="""
import logging
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
class Model(Net):
    def middle(self, x): logging.info("mean %.5f", x.mean().item()); return x
train(Model())
""",
    tqdm_and_a_global_dict="""
import tqdm
state = {"calls": 0}
class Model(Net):
    def middle(self, x):
        state["calls"] += 1
        return x * state["calls"]
bar = tqdm.tqdm(total=4, file=sys.stderr, mininterval=0)
train(Model(), after=lambda step: bar.update()); bar.close(); note(state)
""",
    child_process_in_forward="""
import subprocess
class Model(Net):
    def middle(self, x): return x * float(subprocess.check_output(["echo", "2.5"]))
train(Model())
""",
    fork_in_forward="""
class Model(Net):
    def middle(self, x):
        pid = os.fork()
        if pid == 0: os._exit(7)
        return x * os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
train(Model())
""",
    fork_that_trains_on="""
class Model(Net):
    pass
model = Model(); train(model, steps=2); sys.stdout.flush()
pid = os.fork()
if pid == 0:
    out = model(torch.ones(2, 8)).sum(); out.backward(); os._exit(3)
note(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])); train(model, steps=2)
""",
)

# Waits in forward for something that comes once for each call.
_add(
    event_set_once_for_each_step="""
import threading
asked, ready = threading.Semaphore(0), threading.Event()
def serve():
    for _ in range(4): asked.acquire(); ready.set()
threading.Thread(target=serve, daemon=True).start()
class Model(Net):
    def middle(self, x): ready.wait(); ready.clear(); return x
train(Model(), before=lambda step: asked.release())
""",
    semaphore_released_by_the_loop="""
import threading
permits = threading.Semaphore(0)
class Model(Net):
    def middle(self, x): permits.acquire(); return x
train(Model(), before=lambda step: permits.release())
""",
    pipe_written_by_the_loop="""
reads, writes = os.pipe()
class Model(Net):
    def middle(self, x): return x * (os.read(reads, 1)[0] / 100)
train(Model(), before=lambda step: os.write(writes, bytes([100 + step])))
""",
    simple_queue_filled_by_the_loop="""
import queue
scales = queue.SimpleQueue()
class Model(Net):
    def middle(self, x): return x * scales.get()
train(Model(), before=lambda step: scales.put(1 / step)); note(scales.empty())
""",
    queue_filled_by_a_thread="""
import queue, threading
scales = queue.Queue(maxsize=1)
def fill():
    for n in range(4): scales.put(n + 0.5)
threading.Thread(target=fill, daemon=True).start()
class Model(Net):
    def middle(self, x): return x * scales.get()
train(Model()); note(scales.qsize())
""",
    barrier_with_a_thread="""
import threading
barrier = threading.Barrier(2)
def partner():
    for _ in range(4): barrier.wait()
thread = threading.Thread(target=partner, daemon=True); thread.start()
class Model(Net):
    def middle(self, x): barrier.wait(); return x
train(Model()); thread.join()
""",
    condition_with_a_thread="""
import threading
condition, turn = threading.Condition(), [0]
def partner():
    for n in range(4):
        with condition:
            condition.wait_for(lambda: turn[0] == 2 * n + 1); turn[0] += 1; condition.notify_all()
threading.Thread(target=partner, daemon=True).start()
class Model(Net):
    def middle(self, x):
        with condition:
            turn[0] += 1; condition.notify_all()
            condition.wait_for(lambda: turn[0] % 2 == 0)
        return x * turn[0]
train(Model()); note(turn)
""",
    future_of_a_pool="""
from concurrent.futures import ThreadPoolExecutor
pool, done = ThreadPoolExecutor(1), []
class Model(Net):
    def middle(self, x): return x * pool.submit(lambda: done.append(1) or len(done)).result()
train(Model()); note(len(done)); pool.shutdown()
""",
    event_loop_in_forward="""
import asyncio
loop, seen = asyncio.new_event_loop(), []
async def scale(): await asyncio.sleep(0); seen.append(1); return len(seen)
class Model(Net):
    def middle(self, x): return x * loop.run_until_complete(scale())
train(Model()); note(seen); loop.close()
""",
    multiprocessing_pipe_with_a_child="""
import multiprocessing
ours, theirs = multiprocessing.Pipe()
pid = os.fork()
if pid == 0:
    for n in range(4): theirs.recv(); theirs.send(n + 1)
    os._exit(0)
class Model(Net):
    def middle(self, x): ours.send("next"); return x * ours.recv()
train(Model()); note(os.waitpid(pid, 0)[1])
""",
    threads_that_train_beside="""
import threading
other = Net(); results = []
def evaluate():
    with torch.no_grad(): results.append(other(torch.ones(2, 8)).sum().item())
def around(step):
    thread = threading.Thread(target=evaluate); thread.start(); thread.join()
train(Net(), before=around); note(results)
""",
    data_parallel_by_threads="""
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
class Model(Net):
    def forward(self, x):
        parts = list(pool.map(super().forward, [x[:2], x[2:]]))
        return torch.cat(parts)
train(Model()); pool.shutdown()
""",
    backward_on_another_thread="""
import threading
def call(model, x):
    loss = loss_of(model(x)); thread = threading.Thread(target=lambda: loss.backward(retain_graph=True))
    thread.start(); thread.join()
    return loss
train(Net(), call=call)
""",
    whole_training_on_another_thread="""
import threading
model = Net()
thread = threading.Thread(target=lambda: train(model)); thread.start(); thread.join()
""",
)

# Hooks of every kind see each call once.
_add(
    global_module_hooks="""
from torch.nn.modules import module
module.register_module_forward_pre_hook(lambda m, i: note("pre", type(m).__name__))
module.register_module_forward_hook(lambda m, i, o: note("post", type(m).__name__))
module.register_module_full_backward_hook(lambda m, i, o: note("back", type(m).__name__))
train(Net())
""",
    module_hooks="""
model = Net()
model.register_forward_pre_hook(lambda m, i: note("pre"))
model.register_forward_hook(lambda m, i, o: note("post") or o * 1.5)
model.one.register_full_backward_hook(lambda m, i, o: note("back"))
model.two.register_full_backward_pre_hook(lambda m, o: note("pre back"))
train(model); note(len(model._forward_hooks) > 0)
""",
    tensor_hooks="""
calls = []
class Model(Net):
    def middle(self, x):
        x.register_hook(lambda g: calls.append(1) or g * len(calls))
        return x
model = Model(); model.one.weight.register_hook(lambda g: note("gradient") or g * 2)
model.two.weight.register_post_accumulate_grad_hook(lambda p: note("accumulated"))
train(model); note(len(calls))
""",
    saved_tensor_hooks="""
packed = []
def pack(t): packed.append(tuple(t.shape)); return t * 1.0
def call(model, x):
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: note("unpack") or t):
        return loss_of(model(x))
train(Net(), call=call); note(packed)
""",
    saved_tensors_on_the_host="""
def call(model, x):
    with torch.autograd.graph.save_on_cpu(): return loss_of(model(x))
train(Net(), call=call)
""",
    optimizer_hooks="""
from torch.optim.optimizer import register_optimizer_step_pre_hook
model = Net(); optimizer = torch.optim.AdamW(model.parameters())
optimizer.register_step_post_hook(lambda o, a, k: note("after", len(o.state)))
register_optimizer_step_pre_hook(lambda o, a, k: note("before"))
train(model, optimizer=optimizer)
""",
    graph_node_hooks="""
def call(model, x):
    out = model(x); out.grad_fn.register_prehook(lambda g: note("node"))
    out.grad_fn.register_hook(lambda i, o: note("node after"))
    return loss_of(out)
train(Net(), call=call)
""",
    multi_gradient_hook="""
model = Net()
torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), lambda g: note(len(g)))
train(model)
""",
    optimizer_in_backward="""
model = Net()
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
def step(p): optimizers[p].step(); optimizers[p].zero_grad(); note("stepped")
for p in model.parameters(): p.register_post_accumulate_grad_hook(step)
watch(model)
for n, x in enumerate(data(), start=1):
    loss = loss_of(model(x)); loss.backward(); log(n, loss.detach())
""",
    forward_hook_that_raises="""
model = Net(); calls = []
def hook(m, i, o):
    calls.append(1)
    if len(calls) == 2: raise RuntimeError("hook")
model.one.register_forward_hook(hook); watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n, x in enumerate(data(), start=1):
    try: loss_of(model(x)).backward()
    except RuntimeError as error: note(error); continue
    optimizer.step(); optimizer.zero_grad(); log(n, 0.0)
note(len(calls))
""",
    gradient_hook_that_raises="""
model = Net(); calls = []
def hook(g):
    calls.append(1)
    if len(calls) in (1, 3): raise RuntimeError("hook")
model.one.weight.register_hook(hook); watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n, x in enumerate(data(), start=1):
    try: loss_of(model(x)).backward()
    except RuntimeError as error: note(error)
    optimizer.step(); optimizer.zero_grad(); log(n, 0.0)
""",
    exception_in_forward_caught="""
class Model(Net):
    n = 0
    def middle(self, x):
        self.n += 1
        if self.n in (1, 3): raise ValueError(self.n)
        return x
model = Model(); watch(model); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n, x in enumerate(data(6), start=1):
    try: loss_of(model(x)).backward()
    except ValueError as error: note(error)
    optimizer.step(); optimizer.zero_grad(); log(n, 0.0)
""",
    exception_in_backward_caught="""
class Fails(torch.autograd.Function):
    n = 0
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g):
        Fails.n += 1
        if Fails.n in (1, 3): raise ValueError(Fails.n)
        return g
class Model(Net):
    def middle(self, x): return Fails.apply(x)
model = Model(); watch(model); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n, x in enumerate(data(6), start=1):
    try: loss_of(model(x)).backward()
    except ValueError as error: note(error)
    optimizer.step(); optimizer.zero_grad(); log(n, 0.0)
""",
    out_of_memory_then_a_smaller_batch="""
model = Net(); watch(model); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n, x in enumerate(data(4, samples=4), start=1):
    try:
        if n == 2: raise torch.OutOfMemoryError("no memory")
        loss_of(model(x)).backward()
    except torch.OutOfMemoryError:
        for half in (x[:2], x[2:]): (loss_of(model(half)) / 2).backward()
    optimizer.step(); optimizer.zero_grad(); log(n, 0.0)
""",
    script_that_ends_by_an_exception="""
model = Net()
def after(step):
    if step == 2:
        finish(model); raise RuntimeError("the end")
train(model, after=after)
""",
    script_that_ends_by_sys_exit="""
model = Net()
def after(step):
    if step == 3: finish(model); sys.exit(5)
train(model, after=after)
""",
)

# Modes of the user, the profiler, tracing, warnings.
_MODES = """
from torch.utils._python_dispatch import TorchDispatchMode
from torch.overrides import TorchFunctionMode
seen = []
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        seen.append(str(function)); return function(*args, **(kwargs or {}))
class Function(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        seen.append(getattr(function, "__name__", "")); return function(*args, **(kwargs or {}))
"""
_add(
    dispatch_mode_around_one_step=_MODES
    + """
def call(model, x):
    with Mode(): loss = loss_of(model(x)); loss.backward(retain_graph=True)
    return loss
train(Net(), call=call); note(seen)
""",
    dispatch_mode_around_all_steps=_MODES
    + """
with Mode(): train(Net())
note(seen)
""",
    dispatch_mode_from_step_1_to_step_3=_MODES
    + """
mode = Mode()
def before(step):
    if step == 1: mode.__enter__()
def after(step):
    if step == 3: mode.__exit__(None, None, None)
train(Net(), steps=5, before=before, after=after); note(seen)
""",
    dispatch_mode_entered_in_forward_left_in_the_loop=_MODES
    + """
mode = Mode()
class Model(Net):
    n = 0
    def middle(self, x):
        self.n += 1
        if self.n == 1: mode.__enter__()
        return x
def after(step):
    if step == 2: mode.__exit__(None, None, None)
train(Model(), after=after); note(seen)
""",
    dispatch_mode_entered_before_the_monitor_left_in_step_1=_MODES
    + """
mode = Mode(); mode.__enter__()
class Model(Net):
    n = 0
    def middle(self, x):
        self.n += 1
        if self.n == 1: mode.__exit__(None, None, None)
        return x
train(Model()); note(seen)
""",
    dispatch_mode_inside_forward=_MODES
    + """
class Model(Net):
    def middle(self, x):
        with Mode(): return x.sin()
train(Model()); note(seen)
""",
    two_dispatch_modes_interleaved=_MODES
    + """
first, second = Mode(), Mode()
def before(step): (first if step % 2 else second).__enter__()
def after(step): (first if step % 2 else second).__exit__(None, None, None)
train(Net(), before=before, after=after); note(seen)
""",
    dispatch_mode_left_inside_backward=_MODES
    + """
mode = Mode()
def call(model, x):
    mode.__enter__(); out = model(x); out.register_hook(lambda g: mode.__exit__(None, None, None))
    return loss_of(out)
train(Net(), call=call); note(seen)
""",
    dispatch_mode_that_changes_results=_MODES
    + """
class Halves(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out * 0.5 if function is torch.ops.aten.relu.default else out
with Halves(): train(Net())
""",
    dispatch_mode_that_raises=_MODES
    + """
class Refuses(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.sin.default: raise RuntimeError("refused")
        return function(*args, **(kwargs or {}))
class Model(Net):
    def middle(self, x):
        try:
            with Refuses(): return x.sin()
        except RuntimeError as error: note(error); return x
train(Model())
""",
    function_mode_around_all_steps=_MODES
    + """
with Function(): train(Net())
note([name for name in seen if name in ("linear", "relu", "square", "mean")])
""",
    function_mode_from_step_1_to_step_3=_MODES
    + """
mode = Function()
def before(step):
    if step == 1: mode.__enter__()
def after(step):
    if step == 3: mode.__exit__(None, None, None)
train(Net(), before=before, after=after); note([name for name in seen if name in ("linear", "relu")])
""",
    flop_counter_of_torch_around_a_step="""
from torch.utils.flop_counter import FlopCounterMode
totals = []
def call(model, x):
    with FlopCounterMode(display=False) as counter: loss = loss_of(model(x)); loss.backward(retain_graph=True)
    totals.append(counter.get_total_flops())
    return loss
train(Net(), call=call); note(totals)
""",
    default_device_mode="""
torch.set_default_device("cpu")
train(Net())
""",
    profiler_around_the_run="""
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CPU]) as found: train(Net())
note({e.key: e.count for e in found.key_averages() if e.key in ("aten::addmm", "aten::mm", "aten::relu")})
""",
    profiler_with_a_schedule="""
from torch.profiler import ProfilerActivity, profile, schedule
def ready(p): note(sorted((e.key, e.count) for e in p.key_averages() if e.key in ("aten::addmm", "aten::mm")))
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=2),
             on_trace_ready=ready) as found:
    train(Net(), steps=6, after=lambda step: found.step())
""",
    anomaly_detection="""
with torch.autograd.detect_anomaly(check_nan=True): train(Net())
""",
    warnings_once_for_each_place="""
import warnings
warnings.resetwarnings(); warnings.simplefilter("default"); shown = []
warnings.showwarning = lambda message, *rest: shown.append(str(message)) if "seen" in str(message) else None
class Model(Net):
    def middle(self, x): warnings.warn(f"seen {x.shape[0]}"); return x
train(Model()); note(shown); warnings.warn("seen at the end"); note(shown)
""",
    warnings_as_errors="""
import warnings
warnings.filterwarnings("error", message="odd")
class Model(Net):
    def middle(self, x):
        try: warnings.warn("odd number")
        except UserWarning as error: note(error)
        return x
train(Model()); note(len([f for f in warnings.filters if f[0] == "error"]))
""",
    settrace="""
calls = []
def trace(frame, event, arg):
    if event == "call" and frame.f_code.co_name in ("forward", "middle"): calls.append(frame.f_code.co_name)
def call(model, x):
    sys.settrace(trace)
    try: return loss_of(model(x))
    finally: sys.settrace(None)
train(Net(), call=call); note(calls)
""",
    setprofile_for_the_whole_run="""
calls = []
def profile(frame, event, arg):
    if event == "call" and frame.f_code.co_name == "middle": calls.append(1)
sys.setprofile(profile); train(Net()); still = sys.getprofile() is profile; sys.setprofile(None)
note(len(calls), still)
""",
    garbage_collector_callbacks="""
import gc
gc.disable(); phases = []
gc.callbacks.append(lambda phase, info: phases.append(phase))
class Model(Net):
    def middle(self, x): gc.collect(); return x
train(Model()); note(len(phases) >= 8, gc.isenabled(), gc.get_threshold())
""",
    exception_hooks="""
before = sys.excepthook, sys.unraisablehook, sys.displayhook
train(Net()); note(sys.displayhook is before[2], sys.getrecursionlimit(), sys.getswitchinterval())
""",
    alarm_in_the_middle_of_forward="""
import signal
rung = []
signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
class Model(Net):
    def middle(self, x):
        signal.setitimer(signal.ITIMER_REAL, 0.3); signal.pause()
        return x * len(rung)
train(Model()); note(len(rung), signal.getitimer(signal.ITIMER_REAL)[0])
""",
    signal_handled_in_the_middle="""
import signal
got = []
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
class Model(Net):
    def middle(self, x): os.kill(os.getpid(), signal.SIGTERM); return x * (1 + len(got))
train(Model()); note(got)
""",
    signal_handler_that_raises="""
import signal
class Stop(Exception): pass
def handler(number, frame): raise Stop
signal.signal(signal.SIGUSR1, handler)
class Model(Net):
    n = 0
    def middle(self, x):
        self.n += 1
        if self.n == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            for _ in range(1000): pass
        return x
model = Model(); watch(model); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n, x in enumerate(data(), start=1):
    try: loss_of(model(x)).backward()
    except Stop: note("stopped")
    optimizer.step(); optimizer.zero_grad(); log(n, 0.0)
""",
    signals_of_the_process_are_kept="""
import signal
handlers = {n: signal.getsignal(n) for n in (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)}
train(Net()); note(all(signal.getsignal(n) is h or signal.getsignal(n) == h for n, h in handlers.items()))
note(signal.pthread_sigmask(signal.SIG_BLOCK, []) == set())
""",
    interrupt_in_forward="""
import signal
class Model(Net):
    n = 0
    def middle(self, x):
        self.n += 1
        if self.n == 2: raise KeyboardInterrupt
        return x
model = Model()
try: train(model)
except KeyboardInterrupt: note("interrupted", model.n)
""",
)

# What torch offers around a step.
_add(
    checkpoint_without_reentry="""
from torch.utils.checkpoint import checkpoint
class Model(Net):
    def again(self, x): return nn.functional.dropout(self.one(x), 0.3)
    def middle(self, x): return checkpoint(self.again, x, use_reentrant=False)
train(Model())
""",
    checkpoint_with_reentry="""
from torch.utils.checkpoint import checkpoint
calls = []
def block(model, y): calls.append(torch.is_grad_enabled()); return nn.functional.dropout(model.one(y), 0.3)
class Model(Net):
    def middle(self, x): return checkpoint(block, self, x, use_reentrant=True)
train(Model()); note(calls)
""",
    inference_mode_inside_a_step="""
teacher = Net()
def call(model, x):
    with torch.inference_mode(): target = teacher(x)
    return (model(x) - target.clone()).square().mean()
train(Net(), call=call)
""",
    functorch_before_the_first_step="""
from torch.func import functional_call, grad, vmap
model = Net(); parameters = {k: v.detach() for k, v in model.named_parameters()}
loss = lambda p, row: functional_call(model, p, (row[None],)).square().mean()
note([tuple(g.shape) for g in vmap(grad(loss), (None, 0))(parameters, torch.ones(3, 8)).values()])
train(model)
""",
    functorch_inside_the_step="""
from torch.func import functional_call, grad, vmap
def call(model, x):
    p = {k: v.detach() for k, v in model.named_parameters()}
    loss = lambda p, row: functional_call(model, p, (row[None],)).square().mean()
    norms = sum(g.square().sum() for g in vmap(grad(loss), (None, 0))(p, x).values())
    return loss_of(model(x)) / (1 + norms)
train(Net(), call=call)
""",
    jvp_inside_the_step="""
from torch.func import jvp
def call(model, x):
    out, tangent = jvp(lambda y: model(y), (x,), (torch.ones_like(x),))
    return loss_of(out) + tangent.square().mean()
train(Net(), call=call)
""",
    scripted_model="""
class Plain(nn.Module):
    def __init__(self): super().__init__(); self.one = nn.Linear(8, 4)
    def forward(self, x): return self.one(x).relu()
model = torch.jit.script(Plain()); train(model)
""",
    scripted_while_watched="""
class Plain(nn.Module):
    def __init__(self): super().__init__(); self.one = nn.Linear(8, 4)
    def forward(self, x): return self.one(x).relu()
model = Plain(); train(model, steps=2)
note(torch.jit.script(model).code.count("relu")); train(model, steps=2)
""",
    traced_while_watched="""
model = Net(); train(model, steps=2); traced = torch.jit.trace(model, torch.ones(2, 8))
note(round(traced(torch.ones(2, 8)).sum().item(), 5)); train(model, steps=2)
""",
    exported_while_watched="""
model = Net(); train(model, steps=2)
note(len(torch.fx.symbolic_trace(model).graph.nodes)); train(model, steps=2)
""",
    nested_tensors="""
class Model(Net):
    def forward(self, x):
        nested = torch.nested.nested_tensor([x[:1], x[1:]])
        return torch.cat([super(Model, self).forward(part) for part in nested.unbind()])
train(Model())
""",
    own_function="""
class Scale(torch.autograd.Function):
    calls = 0
    @staticmethod
    def forward(ctx, x, w): Scale.calls += 1; ctx.save_for_backward(x, w); return x @ w * Scale.calls
    @staticmethod
    def backward(ctx, g): x, w = ctx.saved_tensors; return g @ w.T, x.T @ g
class Model(Net):
    def middle(self, x): return Scale.apply(x, self.one.weight)
train(Model()); note(Scale.calls)
""",
    tensor_subclass="""
class Mine(torch.Tensor):
    seen = 0
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        Mine.seen += 1; return super().__torch_function__(function, types, args, kwargs or {})
def call(model, x): return loss_of(model(x.as_subclass(Mine))).as_subclass(torch.Tensor)
train(Net(), call=call); note(Mine.seen)
""",
    layer_frozen_and_swapped_in_the_middle="""
model = Net()
def before(step):
    if step == 2: model.one.requires_grad_(False)
    if step == 3: model.one.requires_grad_(True)
    if step == 4: model.middle = nn.Linear(8, 8)
train(model, steps=5, before=before)
""",
    forward_replaced_in_the_middle="""
model = Net(); calls = []
def replaced(x): calls.append(1); return model.two(model.one(x))
def before(step):
    if step == 3: model.forward = replaced
train(model, before=before); note(len(calls))
""",
    deepcopy_while_watched="""
import copy
model = Net(); kept = []
def after(step):
    kept.append(copy.deepcopy(model))
train(model, after=after)
note([round(m(torch.ones(2, 8)).sum().item(), 5) for m in kept]); finish(model, *kept)
""",
    ema_copy_with_calls="""
import copy
model = Net(); ema = copy.deepcopy(model)
def after(step):
    with torch.no_grad():
        for a, b in zip(ema.parameters(), model.parameters()): a.lerp_(b, 0.1)
        note(round(ema(torch.ones(1, 8)).sum().item(), 6))
train(model, after=after); finish(model, ema)
""",
    swa_averaged_model="""
from torch.optim.swa_utils import AveragedModel
model = Net(); averaged = AveragedModel(model)
train(model, after=lambda step: averaged.update_parameters(model)); finish(model, averaged)
""",
    pickle_while_watched="""
import io, pickle
model = Net(); sizes = []
def after(step):
    file = io.BytesIO(); torch.save(model, file); file.seek(0)
    sizes.append(len(pickle.loads(pickle.dumps(model)).state_dict()))
    note(loss_of(torch.load(file, weights_only=False)(torch.ones(1, 8))).item())
train(model, after=after); note(sizes)
""",
    state_saved_and_loaded="""
model = Net(); kept = {}
def after(step):
    if step == 2: kept.update({k: v.clone() for k, v in model.state_dict().items()})
    if step == 3: model.load_state_dict(kept)
train(model, after=after); note(sorted(kept), repr(model))
""",
    random_state_saved_and_restored="""
class Model(Net):
    def middle(self, x):
        state = torch.get_rng_state(); x = nn.functional.dropout(x, 0.4); torch.set_rng_state(state)
        return nn.functional.dropout(x, 0.4)
train(Model())
""",
    gradient_penalty="""
def call(model, x):
    x = x.clone().requires_grad_(); out = model(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return loss_of(out) + (g.norm(dim=1) - 1).square().mean()
train(Net(), call=call)
""",
    lbfgs="""
model = Net(); watch(model); optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
calls = []
for n, x in enumerate(data(), start=1):
    def closure():
        optimizer.zero_grad(); loss = loss_of(model(x)); loss.backward(); calls.append(1); return loss
    log(n, optimizer.step(closure).detach())
note(len(calls))
""",
    autocast_and_gradient_scaler="""
def call(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16): return loss_of(model(x)).float()
train(Net(), call=call); note(torch.is_autocast_cpu_enabled())
""",
    compiled_model="""
import torch._dynamo
model = Net(); compiled = torch.compile(model, backend="aot_eager")
train(compiled); note(torch._dynamo.utils.counters["stats"]["unique_graphs"])
""",
    compiled_with_a_counting_backend="""
import torch._dynamo
compilations, calls = [], []
def backend(graph, inputs):
    compilations.append(1)
    def run(*args): calls.append(1); return graph(*args)
    return run
train(torch.compile(Net(), backend=backend)); note(len(compilations), len(calls))
""",
    default_dtype_and_grad_mode_kept="""
torch.set_default_dtype(torch.float64)
train(Net(), call=lambda model, x: loss_of(model(x.double())))
note(torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
""",
    training_mode_read_in_forward="""
class Model(Net):
    def middle(self, x): note(self.training, torch.is_grad_enabled()); return x
model = Model()
def after(step):
    model.eval()
    with torch.no_grad(): model(torch.ones(1, 8))
    model.train()
train(model, after=after)
""",
    data_dependent_branch="""
class Model(Net):
    def middle(self, x):
        for _ in range(int(x.sum().item()) % 3 + 1): x = torch.tanh(self.one(x))
        return x
train(Model(), steps=6)
""",
    weights_tied_and_in_place_updates="""
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
model[2].weight = model[0].weight
def before(step):
    with torch.no_grad(): model[0].bias.add_(0.01)
train(model, before=before); note(model[0].weight is model[2].weight, model[0].weight._version)
""",
    stack_read_in_forward="""
import inspect
class Model(Net):
    def middle(self, x):
        note([f.function for f in inspect.stack()[:2]], x.grad_fn is not None, type(x).__name__, x._version)
        return x
train(Model())
""",
    identity_of_tensors="""
seen = set()
class Model(Net):
    def middle(self, x): note(x.data_ptr() == x.detach().data_ptr(), x.is_leaf); return x
def call(model, x): note(model.one.weight.grad is None, x.data_ptr() in seen); return loss_of(model(x))
train(Model(), call=call)
""",
    micro_batches_and_clipping="""
model = Net(); watch(model); optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for n, x in enumerate(data(4, samples=6), start=1):
    for part in x.chunk(3): (loss_of(model(part)) / 3).backward()
    note(round(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)), 6))
    optimizer.step(); optimizer.zero_grad(set_to_none=False); log(n, 0.0)
""",
    scheduler_and_early_stop="""
model = Net(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
def after(step): schedule.step(); note(round(schedule.get_last_lr()[0], 8))
train(model, optimizer=optimizer, after=after)
""",
    loader_with_workers="""
from torch.utils.data import DataLoader, TensorDataset
model = Net(); watch(model); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=3, shuffle=True, num_workers=1)
for n, (x,) in enumerate(loader, start=1):
    loss = loss_of(model(x)); loss.backward(); optimizer.step(); optimizer.zero_grad(); log(n, loss.detach())
""",
    sparse_product="""
adjacency = torch.eye(3).to_sparse()
train(Net(), call=lambda model, x: loss_of(torch.sparse.mm(adjacency, model(x))))
""",
    graph_kept_between_steps="""
class Model(Net):
    carried = None
    def middle(self, x):
        x = x if self.carried is None else x + self.carried.detach()
        self.carried = x
        return x
model = Model(); train(model); note(model.carried.grad_fn is not None)
""",
    second_backward_of_a_kept_graph="""
def call(model, x):
    loss = loss_of(model(x)); loss.backward(retain_graph=True)
    return loss * 0.5
train(Net(), call=call)
""",
    backward_inside_forward="""
class Model(Net):
    def middle(self, x):
        with torch.enable_grad():
            y = x.detach().requires_grad_(); (g,) = torch.autograd.grad(self.one(y).square().sum(), y)
        return x - 0.01 * g
train(Model())
""",
    descriptors_closed_as_a_daemon_does="""
model = Net(); train(model, steps=2); os.closerange(3, 200)
files = [open(f"own_{n}.txt", "w") for n in range(20)]
train(model, steps=2)
for file in files: file.write("mine"); file.close()
""",
)

# How a process ends, and what it does with its children, streams and descriptors.
_add(
    atexit_order="""
import atexit
atexit.register(print, "first registered")
train(Net())
atexit.register(print, "last registered")
""",
    fork_child_sys_exit_runs_atexit="""
import atexit
atexit.register(lambda: (print("atexit"), sys.stdout.flush()))
main = os.getpid()
def after(step):
    if step == 3:
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            note("child goes")
            os.environ["OBSERVED_RECORD"] = os.environ["OBSERVED_RECORD"] + ".child"
            sys.exit(5)
        note(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
train(Net(), after=after)
""",
    non_daemon_thread_outlives_main="""
import threading, time
def late():
    time.sleep(0.3); print("late"); sys.stdout.flush()
threading.Thread(target=late).start()
train(Net())
""",
    standard_input_closed="""
sys.stdin.close(); os.close(0)
train(Net()); note(os.open("x", os.O_CREAT | os.O_WRONLY))
""",
    closerange_then_files="""
def before(step):
    if step == 3:
        sys.stdout.flush()
        os.closerange(3, 4096)
        for n in range(40): globals().setdefault("f", []).append(open(f"file{n}", "w"))
train(Net(), steps=6, before=before)
for n, file in enumerate(f): file.write(f"{n}"); file.close()
""",
    closerange_high_then_dup="""
import resource
def before(step):
    if step == 2:
        os.closerange(3, 4096)
        globals()["fd"] = os.open("kept", os.O_RDWR | os.O_CREAT)
        import fcntl
        globals()["high"] = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for _ in range(10)]
train(Net(), before=before)
os.write(high[0], b"hello")
""",
    fork_between_forward_and_backward="""
def call(model, x):
    loss = loss_of(model(x))
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)
            out = Net()(torch.ones(2, 8)).sum().item()
            print("child", f"{out:.4f}"); sys.stdout.flush()
        finally: os._exit(0)
    note(os.waitpid(pid, 0)[1]); return loss
train(Net(), call=call)
""",
    multiprocessing_pool_in_step="""
import multiprocessing as mp
def square(n): return n * n + torch.ones(2).sum().item()
def before(step):
    with mp.get_context("fork").Pool(2) as pool: note(pool.map(square, [step, 2]))
train(Net(), before=before)
""",
    asyncio_signal_handler="""
import asyncio, signal
async def main():
    loop = asyncio.get_running_loop()
    got = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, got.set)
    loop.add_signal_handler(signal.SIGUSR1, lambda: note("usr1"))
    model = Net(); watch(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, x in enumerate(data(), 1):
        loss = loss_of(model(x)); loss.backward(); optimizer.step(); optimizer.zero_grad()
        log(step, loss.detach())
        if step == 2: os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(got.wait(), 20)
    note("terminated in order", loop.remove_signal_handler(signal.SIGTERM))
asyncio.run(main())
note(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
""",
    wakeup_fd_of_the_program="""
import signal, socket
a, b = socket.socketpair(); b.setblocking(False); a.settimeout(20)
signal.signal(signal.SIGUSR1, lambda *x: note("handled"))
old = signal.set_wakeup_fd(b.fileno())
train(Net(), before=lambda s: os.kill(os.getpid(), signal.SIGUSR1))
note(list(a.recv(64)), signal.set_wakeup_fd(-1) == b.fileno())
""",
    sigterm_kills_in_step="""
import signal
def before(step):
    if step == 3: finish(); os.kill(os.getpid(), signal.SIGTERM)
train(Net(), before=before)
""",
    subprocess_close_fds_false="""
import subprocess
def count():
    out = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True, close_fds=False)
    return len(out.stdout.split())
start = count()
def before(step): note(count() - start)
train(Net(), before=before)
""",
    few_descriptors_allowed="""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = []
def before(step): files.append(open(f"f{step}", "w"))
train(Net(), before=before); note(len(files))
""",
    stderr_replaced_by_a_counting_one="""
class Count:
    def __init__(self): self.text = []
    def write(self, t): self.text.append(t); return len(t)
    def flush(self): pass
mine = Count(); old, sys.stderr = sys.stderr, mine
train(Net())
sys.stderr = old
note(len(mine.text))
""",
)


# How long objects live, and who is called.
_add(
    cyclic_garbage_with_del="""
import gc
gc.disable()
class Cycle:
    def __init__(self, n): self.n, self.me = n, self
    def __del__(self): note("del", self.n)
n = 0
class Model(Net):
    def middle(self, x):
        global n; n += 1; Cycle(n); return x
train(Model(), after=lambda s: note("collected", gc.collect() >= 1))
gc.enable()
""",
    weakref_dies_in_step="""
import weakref
refs = []
class Model(Net):
    def middle(self, x):
        y = torch.sin(x)
        refs.append(weakref.ref(y, lambda r: note("gone", len(refs))))
        return y.square()
train(Model(), after=lambda s: note([r() is None for r in refs]))
""",
    loss_freed_between_steps="""
import weakref
refs = []
def call(model, x):
    loss = loss_of(model(x)); refs.append(weakref.ref(loss)); return loss
train(Net(), call=call, after=lambda s: note([r() is None for r in refs[:-1]]))
""",
    forward_called_in_del="""
class Ender:
    def __init__(self, m): self.m = m
    def __del__(self): note("pass in del", f"{self.m(torch.ones(1, 8)).sum().item():.6f}")
other = Net()
class Model(Net):
    def middle(self, x): Ender(other); return x
train(Model())
""",
    reference_counts="""
model = Net()
def after(step):
    weight = model.one.weight
    note(sys.getrefcount(weight), weight.untyped_storage().nbytes(), sys.getrefcount(model.one))
model.one.weight.requires_grad_(True); train(model, after=after)
""",
    torch_functions_patched="""
real = torch.stack; n = [0]
def counted(*a, **k):
    n[0] += 1; return real(*a, **k)
torch.stack = counted
real_cat, m = torch.cat, [0]
def cat(*a, **k):
    m[0] += 1; return real_cat(*a, **k)
torch.cat = cat
class Model(Net):
    def middle(self, x): return torch.stack([x, x]).sum(0)
train(Model()); note(n, m); torch.stack, torch.cat = real, real_cat
""",
    tensor_methods_patched="""
real = Tensor.backward; n = [0]
def backward(self, *a, **k):
    n[0] += 1; return real(self, *a, **k)
Tensor.backward = backward
item = Tensor.item; i = [0]
def my_item(self):
    i[0] += 1; return item(self)
Tensor.item = my_item
train(Net()); note(n, i); Tensor.backward, Tensor.item = real, item
""",
    builtins_shadowed="""
import builtins
real = builtins.print; seen = []
builtins.print = lambda *a, **k: seen.append(a)
real_open = builtins.open
opened = []
def my_open(*a, **k):
    if threading.current_thread() is threading.main_thread(): opened.append(str(a[0])[-12:])
    return real_open(*a, **k)
import threading
builtins.open = my_open
class Model(Net):
    def middle(self, x): my_open("f", "w").close(); return x
model = Model(); watch(model)
for step, x in enumerate(data(), 1):
    opened.clear(); loss_of(model(x)).backward(); note(opened); log(step)
builtins.print, builtins.open = real, real_open
""",
    warnings_caught_in_forward="""
import warnings
class Model(Net):
    def middle(self, x):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            warnings.warn("here")
        note(len(seen), [str(w.message) for w in seen])
        return x
train(Model()); note(len(warnings.filters), warnings.filters[0][0])
""",
)


# Modes and transforms of torch around or inside a step.
_add(
    torch_function_mode_for_the_whole_run="""
from torch.overrides import TorchFunctionMode
names = []
class Mode(TorchFunctionMode):
    def __torch_function__(self, f, t, a=(), k=None):
        names.append(getattr(f, "__name__", "?")); return f(*a, **(k or {}))
with Mode(): train(Net())
note(names)
""",
    dispatch_mode_for_the_whole_run="""
from torch.utils._python_dispatch import TorchDispatchMode
names = []
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, f, t, a=(), k=None):
        names.append(str(f)); return f(*a, **(k or {}))
with Mode(): train(Net())
note(len(names), names)
""",
    dispatch_mode_left_across_steps="""
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
n = [0]
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, f, t, a=(), k=None):
        n[0] += 1; return f(*a, **(k or {}))
mode = Mode()
def before(step):
    if step == 2: mode.__enter__()
    if step == 4: mode.__exit__(None, None, None)
train(Net(), steps=6, before=before); note(n, len(_get_current_dispatch_mode_stack()))
""",
    fake_tensor_mode_inside="""
from torch._subclasses.fake_tensor import FakeTensorMode
def before(step):
    with FakeTensorMode() as mode:
        out = nn.Linear(8, 8)(torch.empty(3, 8))
        note(out.shape, type(out).__name__); out.sum().backward()
train(Net(), before=before)
""",
    make_fx_inside="""
from torch.fx.experimental.proxy_tensor import make_fx
def before(step):
    g = make_fx(lambda x: torch.mm(x, x).sin())(torch.ones(3, 3)); note([n.name for n in g.graph.nodes])
train(Net(), before=before)
""",
    vmap_per_sample_gradients="""
from torch.func import functional_call, grad, vmap
model = Net()
def call(m, x):
    p = {k: v.detach() for k, v in m.named_parameters()}
    def f(p, s): return loss_of(functional_call(m, p, (s[None],)))
    note(f"{vmap(grad(f), in_dims=(None, 0))(p, x)['two.weight'].norm().item():.8f}"); return loss_of(m(x))
train(model, call=call)
""",
    forward_ad_dual="""
import torch.autograd.forward_ad as fwAD
def before(step):
    with fwAD.dual_level():
        out = model(fwAD.make_dual(torch.ones(1, 8), torch.ones(1, 8)))
        note(fwAD.unpack_dual(out).tangent.tolist())
model = Net(); train(model, before=before)
""",
    fx_symbolic_trace_in_the_middle="""
class Plain(nn.Module):
    def __init__(self):
        super().__init__(); self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)
    def forward(self, x: Tensor) -> Tensor: return self.two(self.one(x).relu())
model = Plain()
def before(step):
    g = torch.fx.symbolic_trace(model); note([n.name for n in g.graph.nodes])
train(model, before=before)
""",
    compiled_optimizer_step="""
model = Net(); opt = torch.optim.Adam(model.parameters(), 0.01)
@torch.compile(backend="eager")
def step_(): opt.step()
watch(model)
for step, x in enumerate(data(), 1):
    loss = loss_of(model(x)); loss.backward(); step_(); opt.zero_grad(); log(step, loss.detach())
note(torch._dynamo.utils.counters["stats"].get("unique_graphs"))
""",
    lazy_modules_uninitialised="""
model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4)); watch(model)
opt = None
for step, x in enumerate(data(), 1):
    loss = loss_of(model(x)); opt = opt or torch.optim.SGD(model.parameters(), 0.1)
    loss.backward(); opt.step(); opt.zero_grad(); log(step, loss.detach())
""",
    gloo_ddp_single="""
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = Net(); ddp = nn.parallel.DistributedDataParallel(model)
train(ddp); dist.destroy_process_group()
""",
    loader_persistent_workers="""
from torch.utils.data import DataLoader, Dataset, get_worker_info
class D(Dataset):
    def __len__(self): return 12
    def __getitem__(self, i): return torch.full((8,), float(i)) + torch.rand(8) + get_worker_info().id
model = Net(); watch(model); opt = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(D(), 3, shuffle=True, num_workers=2, persistent_workers=True)
step = 0
for epoch in range(2):
    for x in loader:
        step += 1
        loss = loss_of(model(x)); loss.backward(); opt.step(); opt.zero_grad(); log(step, loss.detach())
note(step)
""",
)
