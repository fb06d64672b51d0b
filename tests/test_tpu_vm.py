"""The TPU VM job, with a `gcloud` that only notes how it was called."""

import os
import pathlib
import re
import shlex
import shutil
import signal as signals
import subprocess

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / 'scripts' / 'tpu_vm'

# Notes the call in $CALLS, as one line, and behaves as the variables say.
GCLOUD = r"""#!/usr/bin/env bash
echo "gcloud $*" >> "$CALLS"
case "$*" in
  *' list '*)
    [ -z "${LIST_FAILS:-}" ] || exit 1
    # The first line of $STATES at each call; nothing when there are no more.
    printf 'other\tREADY\n'
    state=$(head -n 1 "$STATES"); sed -i 1d "$STATES"
    [ -z "$state" ] || printf 'job-1\t%s\n' "$state" ;;
  *' create '*) [ -z "${CREATE_FAILS:-}" ] ;;
  *t5x.infer*)
    [ -z "${SIGNAL:-}" ] || kill -s "$SIGNAL" "$PPID"
    # The exit code of each run in turn.
    code=$(head -n 1 "$RUNS"); sed -i 1d "$RUNS"
    exit "${code:-0}" ;;
  *' delete '*) [ -z "${DELETE_FAILS:-}" ] ;;
esac
"""
NOTE = '#!/bin/sh\necho "${0##*/} $*" >> "$CALLS"\n'

ZONE = ['--zone=us-central2-b', '--project=p', '--quiet']
GIN = '--gin.TASK_FEATURE_LENGTHS={\'inputs\': 64, "targets":  64}'
OUTPUT = '--gin.INFER_OUTPUT_DIR="gs://b/out"'
OPTIONS = [
    '--name=job-1', '--zone=us-central2-b', '--project=p', '--type=v4-8', '--output=gs://b/out',
]


def heed_signals():
  """A shell cannot trap what is ignored when it starts, as under nohup or in the background."""
  for signal in (signals.SIGHUP, signals.SIGINT):
    signals.signal(signal, signals.SIG_DFL)


class Job:
  """A checkout with nothing but the scripts, and the commands that they find on PATH."""

  def __init__(self, folder: pathlib.Path):
    self.checkout = folder / 'checkout'
    self.script = self.checkout / 'scripts' / 'tpu_vm' / 'job.sh'
    shutil.copytree(FOLDER, self.script.parent)
    self.to = folder / 'results'
    self.calls, self.states, self.runs = folder / 'calls', folder / 'states', folder / 'runs'
    self.bin = folder / 'bin'
    self.bin.mkdir()
    for name, text in (('gcloud', GCLOUD), ('tar', NOTE), ('sleep', NOTE)):
      (self.bin / name).write_text(text)
      (self.bin / name).chmod(0o755)

  def __call__(self, *arguments: str, states=(), runs=(), **variables: str):
    """Calls the script; `states` are those of the TPU VM, `runs` the exit codes of its runs."""
    self.calls.write_text('')
    self.states.write_text(''.join(f'{x}\n' for x in states))
    self.runs.write_text(''.join(f'{x}\n' for x in runs))
    environment = {
        'PATH': f'{self.bin}:{os.environ["PATH"]}', 'CALLS': str(self.calls),
        'STATES': str(self.states), 'RUNS': str(self.runs),
    }
    return subprocess.run(
        ['bash', self.script, *arguments], capture_output=True, text=True, timeout=20,
        cwd=self.checkout, env=os.environ | environment | variables,
        preexec_fn=heed_signals,
    )

  def all(self, *options: str, arguments=(GIN, OUTPUT), **kwargs):
    return self('all', *OPTIONS, f'--to={self.to}', *options, '--', *arguments, **kwargs)

  def steps(self) -> list[str]:
    """What the calls since the last start were for."""
    names = []
    for line in self.calls.read_text().splitlines():
      found = re.search(
          r't5x\.infer|install\.sh|tpu-vm (create|delete|list|scp)|storage rsync|^(tar|sleep)', line
      )
      assert found, line
      names.append(found[0].split()[-1])
    return names


@pytest.fixture
def job(tmp_path):
  return Job(tmp_path)


def commands(done: subprocess.CompletedProcess) -> list[list[str]]:
  """The commands of a dry run, as a shell reads them."""
  assert done.returncode == 0, done.stderr
  return [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith('#')]


def remote(line: list[str]) -> str:
  """The command line that a call of `ssh` executes on the hosts."""
  (found,) = [word for word in line if word.startswith('--command=')]
  return found.removeprefix('--command=')


def expected(job: Job, kind: str, image: str, run: str, *create: str) -> list[list[str]]:
  vm = ['gcloud', 'compute', 'tpus', 'tpu-vm']
  archive = f'{job.checkout}/dist/job-1.tar.gz'
  return [
      [*vm, 'list', '--format=value(name.basename(),state)', *ZONE],
      [*vm, 'create', 'job-1', f'--accelerator-type={kind}', f'--version={image}', *create, *ZONE],
      ['mkdir', '-p', f'{job.checkout}/dist'],
      ['tar', '-czf', archive, '--exclude=./.git', '--exclude=./.venv*', '--exclude=./build',
       '--exclude=./dist', '--exclude=./out*', '--exclude=./runs', '--exclude=__pycache__',
       '--exclude=.*_cache', '--exclude=.hypothesis', '-C', str(job.checkout), '.'],
      [*vm, 'scp', archive, 'job-1:speculative_t5x.tar.gz', '--worker=all', *ZONE],
      [*vm, 'ssh', 'job-1', '--worker=all',
       '--command=rm -rf speculative_t5x/checkout && mkdir -p speculative_t5x/checkout'
       ' && tar -xzf speculative_t5x.tar.gz -C speculative_t5x/checkout'
       ' && bash speculative_t5x/checkout/scripts/tpu_vm/install.sh --device=tpu'
       ' --folder=speculative_t5x/env', *ZONE],
      [*vm, 'ssh', 'job-1', '--worker=all',
       '--command=cd speculative_t5x/checkout && . ../env/activate && JAX_PLATFORMS=tpu,cpu'
       f' flock ../run.lock {run} --gin_file=a.gin', *ZONE],
      ['mkdir', '-p', str(job.to)],
      ['gcloud', 'storage', 'rsync', '--recursive', 'gs://b/out', str(job.to), '--project=p'],
      [*vm, 'delete', 'job-1', *ZONE],
  ]


def test_single_host(job):
  found = commands(job.all(arguments=['--gin_file=a.gin']))
  assert found == expected(job, 'v4-8', 'tpu-ubuntu2204-base', 'python -m t5x.infer')


def test_slice(job):
  done = job.all('--type=v5litepod-16', '--spot', arguments=['--gin_file=a.gin'])
  start = (
      "python -c 'import jax, runpy; jax.distributed.initialize();"
      ' runpy.run_module("t5x.infer", run_name="__main__", alter_sys=True)\''
  )
  assert commands(done) == expected(job, 'v5litepod-16', 'v2-alpha-tpuv5-lite', start, '--spot')


def test_steps_are_the_parts_of_all(job):
  rest = [*OPTIONS, f'--to={job.to}', '--', OUTPUT]
  parts = [
      line for step in ('create', 'install', 'run', 'copy', 'delete')
      for line in commands(job(step, *rest))
  ]
  assert parts == commands(job('all', *rest))


@pytest.mark.parametrize('kind, image', [
    ('v3-8', 'tpu-ubuntu2204-base'), ('v5p-16', 'v2-alpha-tpuv5'), ('v6e-8', 'v2-alpha-tpuv6e'),
])
def test_image(job, kind, image):
  assert f'--version={image}' in commands(job.all(f'--type={kind}'))[1]
  assert '--version=mine' in commands(job.all(f'--type={kind}', '--version=mine'))[1]


def test_output_on_the_host_is_copied_from_there(job):
  copy = commands(job.all('--output=/tmp/out'))[-2]
  assert copy[3:] == ['tpu-vm', 'scp', '--recurse', 'job-1:/tmp/out/*', str(job.to), '--worker=0',
                      *ZONE]


@pytest.mark.parametrize('kind', ['v4-8', 'v4-16'])
def test_arguments_arrive_verbatim(job, tmp_path, kind):
  hard = [GIN, OUTPUT, "it's", '', 'a\\b $HOME `x` "y"  z', '*', '~', '-- ;&|', 'ä\tö']
  line = commands(job.all(f'--type={kind}', arguments=hard))[6]
  # What the host's shell makes of it, with a `flock` that prints what comes behind the lock.
  (tmp_path / 'flock').write_text('#!/bin/sh\nshift 3\nprintf "%s\\0" "$@"\n')
  (tmp_path / 'flock').chmod(0o755)
  (tmp_path / 'env').mkdir()
  (tmp_path / 'env' / 'activate').write_text('')
  (tmp_path / 'speculative_t5x').symlink_to(tmp_path)
  # gcloud splits the command at spaces and joins it again.
  done = subprocess.run(
      ['bash', '-c', ' '.join(remote(line).split(' '))], cwd=tmp_path, check=True,
      capture_output=True, text=True, env=os.environ | {'PATH': f'{tmp_path}:{os.environ["PATH"]}'},
  )
  assert done.stdout.split('\0')[1:-1] == hard


def test_dry_run_is_the_default_and_calls_nothing(job):
  for step in ('create', 'install', 'run', 'copy', 'delete', 'all'):
    done = job(step, *OPTIONS, f'--to={job.to}', '--retries=2', '--', OUTPUT)
    assert done.returncode == 0
    assert 'Dry run' in done.stderr
    assert job.calls.read_text() == ''
  assert not job.to.exists()
  assert not (job.checkout / 'dist').exists()


def test_execution(job):
  done = job.all('--execute', states=['', 'READY'])
  assert done.returncode == 0, done.stderr
  assert job.steps() == [
      'list', 'create', 'tar', 'scp', 'install.sh', 't5x.infer', 'rsync', 'list', 'delete',
  ]
  assert job.to.is_dir()


def test_a_failing_run_deletes_the_tpu_vm(job):
  done = job.all('--execute', '--retries=3', states=['', 'READY', 'READY'], runs=[7])
  assert done.returncode == 7
  assert job.steps()[-4:] == ['t5x.infer', 'list', 'list', 'delete']
  assert 'found 7' in done.stderr


@pytest.mark.parametrize('signal, code', [('INT', 130), ('TERM', 143), ('HUP', 129)])
def test_an_interrupted_run_deletes_the_tpu_vm(job, signal, code):
  done = job.all('--execute', states=['', 'READY'], SIGNAL=signal)
  assert done.returncode == code
  assert job.steps()[-3:] == ['t5x.infer', 'list', 'delete']


def test_keep(job):
  assert job.all('--execute', '--keep', states=['', 'READY', 'READY'], runs=[7]).returncode == 7
  assert 'delete' not in job.steps()
  assert commands(job.all('--keep'))[-1][1] == 'storage'


@pytest.mark.parametrize('state', ['PREEMPTED', 'TERMINATED'])
def test_a_preempted_run_begins_anew(job, state):
  done = job.all('--execute', '--spot', '--retries=1', states=['', state, 'READY'], runs=[1, 0])
  assert done.returncode == 0, done.stderr
  anew = ['create', 'tar', 'scp', 'install.sh', 't5x.infer']
  assert job.steps() == ['list', *anew, 'list', 'delete', *anew, 'rsync', 'list', 'delete']


def test_retries_end(job):
  done = job.all('--execute', '--retries=1', states=['', *['PREEMPTED'] * 3], runs=[1, 3])
  assert done.returncode == 3
  assert job.steps().count('t5x.infer') == 2
  assert job.steps()[-1] == 'delete'


def test_the_step_run_begins_anew_too(job):
  done = job('run', *OPTIONS, '--execute', '--retries=1', '--', OUTPUT, states=['PREEMPTED'],
             runs=[1, 0])
  assert done.returncode == 0, done.stderr
  assert job.steps() == [
      't5x.infer', 'list', 'delete', 'create', 'tar', 'scp', 'install.sh', 't5x.infer',
  ]


def test_a_name_in_use_is_left_alone(job):
  done = job.all('--execute', states=['READY'])
  assert done.returncode == 2
  assert job.steps() == ['list']
  assert 'found job-1 in state READY' in done.stderr


def test_nothing_is_made_when_gcloud_fails(job):
  assert job.all('--execute', LIST_FAILS='1').returncode == 1
  assert job.steps() == ['list']


def test_what_was_refused_is_not_deleted(job):
  assert job.all('--execute', CREATE_FAILS='1').returncode == 1
  assert job.steps() == ['list', 'create', 'list']


def test_what_was_made_in_part_is_deleted(job):
  assert job.all('--execute', states=['', 'CREATING'], CREATE_FAILS='1').returncode == 1
  assert job.steps() == ['list', 'create', 'list', 'delete']


def test_a_failing_deletion_is_tried_again_and_told(job):
  done = job.all('--execute', states=['', 'READY'], DELETE_FAILS='1')
  assert done.returncode == 1
  assert job.steps().count('delete') == 3
  assert 'it costs money' in done.stderr.splitlines()[-1]


@pytest.mark.parametrize('arguments, message', [
    ([], 'step: expected create, install, run, copy, delete or all, found none'),
    (['start'], 'found start'),
    (['all', '--name=a', '--zone=z', '--type=v4-8', '--output=gs://b/o', '--', 'x'], '--to'),
    (['all', *OPTIONS, '--to=t'], 'arguments: expected those of t5x.infer behind --, found none'),
    (['all', *OPTIONS, '--to=t', 'x'], 'found x'),
    (['all', *OPTIONS, '--to=t', '--size=3', '--', 'x'], 'found --size=3'),
    (['delete', '--name', '--zone=z'], '--name: expected a value, found --zone=z'),
    (['delete', '--zone=z', '--name'], '--name: expected a value, found none'),
    (['delete', '--zone=z', '--name='], '--name: expected a value, found none'),
    (['delete', '--zone=z', '--name=A b'], 'found A b'),
    (['create', *OPTIONS, '--type=v4'], 'found v4'),
    (['create', *OPTIONS, '--type=v9-8'], 'or --version, found v9-8'),
    (['create', *OPTIONS, '--retries=-1'], '--retries: expected a number, found -1'),
    (['copy', *OPTIONS, '--to=t', '--output=out'], 'found out'),
    (['copy', *OPTIONS, '--to=t', '--output=gs://b'], 'found gs://b'),
    (['all', *OPTIONS, '--to=t', '--type=v5p-16', '--output=/out', '--', 'x'], 'several hosts'),
])
def test_bad_arguments(job, arguments, message):
  if arguments:
    arguments = [arguments[0], '--execute', *arguments[1:]]
  done = job(*arguments)
  assert done.returncode == 2
  assert done.stdout == ''
  (line,) = done.stderr.splitlines()
  assert line.startswith('error: ')
  assert 'expected' in line
  assert message in line
  assert job.calls.read_text() == ''
  assert not (job.checkout / 'dist').exists()


def test_an_output_that_no_argument_names_is_told(job):
  assert 'no argument contains gs://b/out' in job.all(arguments=['--gin_file=a.gin']).stderr
  assert 'no argument' not in job.all().stderr


def test_the_readme_s_commands_are_accepted(job):
  blocks = re.findall(r'^```bash\n(.*?)^```$', (FOLDER / 'README.md').read_text(), re.M | re.S)
  (block,) = [block for block in blocks if 'job.sh' in block]
  words = shlex.split(block.replace('\\\n', ''))
  done = job(*words[words.index('all'):])
  assert len(commands(done)) == 10
  assert 'note' not in done.stderr
  assert remote(commands(done)[6]).endswith(
      """ '--gin.TASK_FEATURE_LENGTHS={'\\''inputs'\\'': 64, '\\''targets'\\'': 64}'"""
      """ '--gin.INFER_OUTPUT_DIR="gs://my-bucket/out"'"""
  )


def test_help(job):
  done = job('--help')
  assert done.returncode == 0
  assert '--retries N' in done.stdout


def test_archive(job, tmp_path):
  for name in ('pyproject.toml', 'my_tasks.py', '.git/HEAD', '.github/x', '.venv/x', 'dist/x',
               'runs/x', 'gin_configs/runs/x.gin', 'a/__pycache__/x.pyc', '.ruff_cache/x'):
    (job.checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (job.checkout / name).write_text('')
  (line,) = [x for x in commands(job('install', *OPTIONS)) if x[0] == 'tar']
  line[2] = str(tmp_path / 'archive.tar.gz')
  subprocess.run(line, check=True)
  names = subprocess.run(
      ['tar', '-tzf', line[2]], check=True, capture_output=True, text=True).stdout.splitlines()
  assert {x for x in names if not x.endswith('/')} == {
      f'./{x}' for x in ('pyproject.toml', 'my_tasks.py', '.github/x', 'gin_configs/runs/x.gin')
  } | {f'./scripts/tpu_vm/{path.name}' for path in FOLDER.iterdir()}


@pytest.mark.parametrize('arguments, message', [
    (['--device=gpu'], '--device: expected tpu or cpu, found gpu'),
    (['--folder'], '--folder: expected a value, found none'),
    (['cpu'], 'expected --device and --folder, found cpu'),
])
def test_install_refuses_bad_arguments(tmp_path, arguments, message):
  script = Job(tmp_path).script.parent / 'install.sh'
  done = subprocess.run(['bash', script, *arguments], capture_output=True, text=True)
  assert done.returncode == 2
  assert done.stderr.splitlines() == [f'error: {message}'.replace(
      'error: expected', 'error: arguments: expected')]
  assert not (tmp_path / 'checkout' / '.venv_t5x').exists()


def test_install_refuses_an_unsuitable_python(tmp_path):
  job = Job(tmp_path)
  fake = job.bin / 'python3.10'
  fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.10.12" && exit 0\nexit 1\n')
  fake.chmod(0o755)
  done = subprocess.run(
      ['bash', job.script.parent / 'install.sh'], capture_output=True, text=True,
      env=os.environ | {'PYTHON': str(fake)},
  )
  assert done.returncode == 2
  assert 'expected Python 3.11' in done.stderr
  assert 'Python 3.10.12' in done.stderr
  assert not (job.checkout / '.venv_t5x').exists()


def test_constraints_are_exact_and_hold_the_package_s_own_dependencies():
  lines = (FOLDER / 'constraints.txt').read_text().splitlines()
  pins = [line for line in lines if not line.startswith('#')]
  assert len(lines) - len(pins) == 2
  assert all(re.fullmatch(r'[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*', line) for line in pins)
  names = {re.sub('[-_.]+', '-', line.split('==')[0]).lower() for line in pins}
  assert len(names) == len(pins)
  project = (FOLDER.parents[1] / 'pyproject.toml').read_text()
  block = re.search(r'^dependencies = \[\n(.*?)^\]', project, re.M | re.S)[1]
  dependencies = set(re.findall(r"^  '([a-z0-9-]+)", block, re.M))
  assert dependencies
  assert dependencies <= names


@pytest.mark.parametrize('name', ['job.sh', 'install.sh'])
def test_script_parses_and_can_be_run(name):
  subprocess.run(['bash', '-n', FOLDER / name], check=True)
  assert os.access(FOLDER / name, os.X_OK)
