"""The examples in fresh processes, as a user starts them."""

import pathlib
import re
import shutil
import statistics

import pytest

from processes import FULL, kept_in
from processes import user_python as python
from sizes import cases

pytestmark = pytest.mark.processes
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SEEDS = 5 if FULL else cases(2, 5)
PNG = b"\x89PNG\r\n\x1a\n"


def is_picture(file):
    return file.read_bytes().startswith(PNG) and file.stat().st_size > 5_000


@pytest.mark.slow
@pytest.mark.thorough
def test_one_line_changes_the_placement_and_no_bit():
    finished = python(str(EXAMPLES / "one_line.py"), timeout=500)
    assert finished.returncode == 0, finished.stderr
    for devices in (4, 2, 1):
        assert f"4 replicas on {devices} cpu device" in finished.stdout
    for kind in ("sequential", "functional", "Subclassed"):
        lines = re.findall(rf"{kind} +evaluate ([\d.]+)% +predict ([\d.]+)% +([0-9a-f]{{32}})", finished.stdout)
        assert len(lines) == 3
        assert len(set(lines)) == 1
        evaluated, predicted, _ = lines[0]
        assert evaluated == predicted
        assert float(evaluated) > 95


@pytest.mark.slow
@pytest.mark.thorough
def test_half_precision_prints_its_dtypes():
    finished = python(str(EXAMPLES / "mixed_precision.py"))
    assert finished.returncode == 0, finished.stderr
    bfloat16, float16 = finished.stdout.split("mixed_bfloat16\n")[1].split("mixed_float16\n")
    for half, text in (("bfloat16", bfloat16), ("float16", float16)):
        assert f"hidden computes in {half}, its variables are float32" in text
        assert "logits computes in float32, its variables are float32" in text
        lines = re.findall(r"on [12]: accuracy ([\d.]+)%, ([0-9a-f]{32})", text)
        assert len(lines) == 2
        assert lines[0] == lines[1]
        assert float(lines[0][0]) > 95
    assert "no loss scale" in bfloat16
    assert re.search(r"loss scale \d+", float16)


@pytest.mark.slow
@pytest.mark.thorough
def test_fit_and_loop_end_with_the_same_bits_and_the_wrong_loop_is_refused(tmp_path):
    picture = tmp_path / "curves.png"
    finished = python(str(EXAMPLES / "cifar_fit_and_loop.py"), "--seeds", str(SEEDS), "--picture", str(picture), timeout=500)
    assert finished.returncode == 0, finished.stderr
    assert "is refused:\n  An array of shape (128, 8, 8, 1) reaches replica code as an argument" in finished.stdout
    seen = re.findall(r"^(.+?) +seed (\d)  validation accuracy ([\d.]+)%  ([0-9a-f]{32})$", finished.stdout, re.MULTILINE)
    runs = {name: [line[1:] for line in seen if line[0] == name] for name in ("fit", "loop", "loop, not distributed")}
    assert [len(lines) for lines in runs.values()] == [SEEDS] * 3
    assert runs["fit"] == runs["loop"]
    assert len({fingerprint for *_, fingerprint in seen}) == 2 * SEEDS
    assert min(float(accuracy) for _, accuracy, _ in runs["loop"]) > 85
    assert f"fit and loop have the same fingerprint for {SEEDS} of {SEEDS} seeds" in finished.stdout
    means = {}
    for name, lines in runs.items():
        last = [float(accuracy) for _, accuracy, _ in lines]
        means[name] = statistics.mean(last), statistics.stdev(last)
        line = re.search(rf"^{name} +validation accuracy ([\d.]+)% \+- ([\d.]+)%$", finished.stdout, re.MULTILINE)
        assert [float(number) for number in line.groups()] == pytest.approx(means[name], abs=0.06)
    verdict = re.search(
        r"^(A|No) gap between right and wrong loop on this data: ([\d.]+) points, spread ([\d.]+)", finished.stdout, re.MULTILINE
    )
    (right, of_right), (wrong, of_wrong) = means["loop"], means["loop, not distributed"]
    assert [float(verdict[2]), float(verdict[3])] == pytest.approx([abs(right - wrong), of_right + of_wrong], abs=0.16)
    assert (verdict[1] == "A") == (float(verdict[2]) > float(verdict[3]))
    assert is_picture(picture)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_tutorial_of_custom_loops_learns_in_each_shape_of_loop():
    finished = python(str(EXAMPLES / "fashion_mnist_loop.py"))
    assert finished.returncode == 0, finished.stderr
    assert "Warning" not in finished.stderr
    rows = re.findall(r"(.+?) +loss ([\d.]+)  accuracy ([\d.]+)%  test loss ([\d.]+)  test accuracy ([\d.]+)%", finished.stdout)
    assert [name.strip() for name, *_ in rows] == [*(f"epoch {i}" for i in range(1, 6)), "ten steps", "one epoch"]
    losses = [float(loss) for _, loss, *_ in rows]
    assert losses == sorted(losses, reverse=True)
    assert float(rows[-1][-1]) > 75
    assert f"restored without a strategy: test accuracy {rows[4][-1]}%\n" in finished.stdout
    assert "a replica's share  1.25, 2.25\n" in finished.stdout
    assert "loss of the batch  3.5\n" in finished.stdout
    assert "mean of the shares 1.75" in finished.stdout


@pytest.mark.slow
@pytest.mark.thorough
def test_three_loads_of_a_model_evaluate_the_same(tmp_path):
    finished = python(str(EXAMPLES / "mnist_fit.py"), "--directory", str(tmp_path))
    assert finished.returncode == 0, finished.stderr
    assert "Warning" not in finished.stderr
    names = ("the latest weights", "exported, loaded without a strategy", "exported, loaded with one")
    lines = [re.search(rf"^{name} +loss ([\d.]+)  accuracy ([\d.]+)%$", finished.stdout, re.MULTILINE) for name in names]
    assert len({line.groups() for line in lines if line}) == 1
    assert None not in lines
    assert float(lines[0][2]) > 80
    assert (
        re.findall(r"Learning rate for epoch \d+ is ([\d.]+)", finished.stdout)
        == ["0.001000"] * 3 + ["0.000100"] * 4 + ["0.000010"] * 5
    )
    assert len(list((tmp_path / "training_checkpoints").glob("*.weights.h5"))) == 12
    assert list((tmp_path / "logs").rglob("*tfevents*"))


@pytest.mark.slow
@pytest.mark.thorough
def test_accumulation_changes_no_curve_and_its_placement_no_bit(tmp_path):
    picture = tmp_path / "curves.png"
    finished = python(str(EXAMPLES / "accumulation.py"), "--picture", str(picture))
    assert finished.returncode == 0, finished.stderr
    assert len(re.findall(r"final loss 0\.\d+, mean of 3 runs", finished.stdout)) == 4
    difference = re.search(r"largest difference between the final losses of a run: (\S+)", finished.stdout)
    assert difference is not None
    assert float(difference[1]) < 1e-5
    bits = re.findall(r"run \d  ([0-9a-f]{32})  ([0-9a-f]{32})  the same bits", finished.stdout)
    assert len(bits) == 3
    assert all(one == other for one, other in bits)
    assert len({one for one, _ in bits}) == 3
    assert is_picture(picture)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_fit_in_several_processes_one_of_which_is_killed(tmp_path):
    script = str(EXAMPLES / "multi_worker_fit.py")
    programs = kept_in(tmp_path / "programs")
    alone = python(script, "--backup", str(tmp_path / "alone"))
    launch = ["-m", "unisono", "launch", "--cpu", "--processes", "2", "--restarts", "1"]
    killed = python(*launch, script, "--backup", str(tmp_path / "launched"), "--kill-at", "15", **programs)
    bits = []
    for finished in (alone, killed):
        assert finished.returncode == 0, finished.stderr[-3000:]
        bits += re.findall(r"process \d of \d: 8 replicas, test accuracy ([\d.]+)%, fingerprint ([0-9a-f]{32})", finished.stdout)
    assert len(bits) == 3
    assert len(set(bits)) == 1
    assert float(bits[0][0]) > 90
    assert "process 1 was killed by SIGKILL.\nunisono launch: restart 1 of 1, with 2 processes." in killed.stderr
    assert "Warning" not in killed.stderr


@pytest.mark.slow
@pytest.mark.thorough
def test_a_loop_goes_on_in_several_processes(tmp_path):
    script, directory = str(EXAMPLES / "multi_worker_loop.py"), str(tmp_path / "ckpts")
    alone = python(script, "--checkpoints", directory)
    assert alone.returncode == 0, alone.stderr[-3000:]
    accuracies = [float(percent) for percent in re.findall(r"epoch \d: loss [\d.]+, accuracy ([\d.]+)%", alone.stdout)]
    assert accuracies == sorted(accuracies)
    assert accuracies[-1] > 75
    shutil.rmtree(f"{directory}/ckpt_5")
    goes_on = python("-m", "unisono", "launch", "--cpu", "--processes", "2", script, "--checkpoints", directory)
    assert goes_on.returncode == 0, goes_on.stderr[-3000:]
    (fingerprint,) = re.findall(r"fingerprint ([0-9a-f]{32})", alone.stdout)
    assert re.findall(r"fingerprint ([0-9a-f]{32})", goes_on.stdout) == [fingerprint] * 2
    assert re.findall(r"epoch (\d)", goes_on.stdout) == ["5"]


@pytest.mark.slow
@pytest.mark.thorough
def test_two_networks_train_each_other(tmp_path):
    picture = tmp_path / "gan.png"
    finished = python(str(EXAMPLES / "gan.py"), "--picture", str(picture))
    assert finished.returncode == 0, finished.stderr
    right = [int(percent) for percent in re.findall(r"\((\d+)% right\)", finished.stdout)]
    assert right[0] > 70 > right[-1]
    assert is_picture(picture)


def run_on_both_placements(name, *arguments, **variables):
    """Run an example on one device and on two; return what the two have printed, and check that both fingerprints are equal."""
    printed = []
    for devices in ("1", "2"):
        finished = python(str(EXAMPLES / name), "--devices", devices, *arguments, timeout=500, **variables)
        assert finished.returncode == 0, finished.stderr[-3000:]
        assert "Warning" not in finished.stderr
        printed.append(finished.stdout)
    one, two = (re.findall(r"[0-9a-f]{32}", text) for text in printed)
    assert one == two != []
    return printed[0]


def read_parts(printed):
    """Return the table of the fine-tuning: for each part the losses and the accuracy in per cent."""
    lines = re.findall(r"^(.+?) +[\d,]+ weights  loss ([\d.]+) -> ([\d.]+)  [a-z ]+ +([\d.]+)%", printed, re.MULTILINE)
    parts = {name: tuple(map(float, numbers)) for name, *numbers in lines}
    assert list(parts) == ["pre-training", "head, encoder frozen", "all, encoder unfrozen", "all, without pre-training"]
    return parts


@pytest.mark.slow
@pytest.mark.thorough
def test_fine_tuning_learns():
    finished = python(str(EXAMPLES / "fine_tuning.py"), "--epochs", "3", timeout=500)
    assert finished.returncode == 0, finished.stderr
    assert all(last < first for first, last, _ in read_parts(finished.stdout).values())


@pytest.mark.slow
@pytest.mark.thorough
def test_fine_tuning_has_the_same_bits_on_both_placements(tmp_path):
    run_on_both_placements("fine_tuning.py", "--epochs", "3", **kept_in(tmp_path))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_pre_trained_encoder_knows_the_names_of_the_test():
    finished = python(str(EXAMPLES / "fine_tuning.py"), timeout=500)
    assert finished.returncode == 0, finished.stderr
    parts = read_parts(finished.stdout)
    assert all(last < first for first, last, _ in parts.values())
    frozen, unfrozen, without = (parts[name][-1] for name in list(parts)[1:])
    assert frozen > 70
    assert unfrozen > frozen
    assert without < 50


IMAGES = ("image_classification.py", "--epochs", "1", "--pictures", "192", "--picture")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.compat
def test_images_from_grain_are_classified(tmp_path):
    pytest.importorskip("grain")
    name, *options = IMAGES
    finished = python(str(EXAMPLES / name), *options, str(tmp_path / "result.png"), timeout=500)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "Warning" not in finished.stderr
    assert is_picture(tmp_path / "result.png")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.compat
def test_images_from_grain_have_the_same_bits_on_both_placements(tmp_path):
    pytest.importorskip("grain")
    run_on_both_placements(*IMAGES, str(tmp_path / "result.png"), **kept_in(tmp_path / "programs"))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_net_of_keras_applications_learns_shapes(tmp_path):
    pytest.importorskip("grain")
    picture = tmp_path / "result.png"
    finished = python(str(EXAMPLES / "image_classification.py"), "--picture", str(picture), timeout=500)
    assert finished.returncode == 0, finished.stderr
    losses = [float(loss) for loss in re.findall(r" loss: ([\d.]+)", finished.stdout)]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 8
    assert float(re.search(r"test accuracy ([\d.]+)%, by guessing 12.5%", finished.stdout)[1]) > 80
    assert is_picture(picture)


def read_language_model(*arguments, **variables):
    """Return (losses of the epochs on held out text, characters that are right, characters by guessing)."""
    finished = python(str(EXAMPLES / "language_model.py"), *arguments, timeout=500, **variables)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "Warning" not in finished.stderr
    (whole,) = re.findall(r"^whole .* ([0-9a-f]{32})$", finished.stdout, re.MULTILINE)
    (resumed,) = re.findall(r"^resumed .* ([0-9a-f]{32})$", finished.stdout, re.MULTILINE)
    assert whole == resumed
    assert re.search(r"^killed .* none: SIGKILL$", finished.stdout, re.MULTILINE)
    assert "The resumed run has the bits of the whole one." in finished.stdout
    right, guessed = re.findall(r"right: ([\d.]+)%; always the most frequent one: ([\d.]+)%", finished.stdout)[0]
    return [float(loss) for loss in re.findall(r" val_loss: ([\d.]+)", finished.stdout)], float(right), float(guessed)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_language_model_that_is_killed_resumes_with_the_same_bits(tmp_path):
    losses, *_ = read_language_model("--steps", "6", **kept_in(tmp_path))
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_language_model_learns_to_predict_characters():
    losses, right, guessed = read_language_model()
    assert losses == sorted(losses, reverse=True)
    assert right > 40 > 2 * guessed
