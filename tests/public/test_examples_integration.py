"""The examples in fresh processes, as a user starts them."""

import pathlib
import re
import shutil
import statistics

import pytest

from processes import FULL, kept_in
from processes import user_python as python
from sizes import cases

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.thorough]
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SEEDS = 5 if FULL else cases(2, 5)
PNG = b"\x89PNG\r\n\x1a\n"


def run(name, *options, launch=(), silently=False, **variables):
    """Run an example; return what it has printed, and what it has said beside that, in which there may be no warning."""
    finished = python(*launch, str(EXAMPLES / name), *options, timeout=500, **variables)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert not silently or "Warning" not in finished.stderr
    return finished.stdout, finished.stderr


LAUNCHED = ("-m", "unisono", "launch", "--cpu", "--processes", "2")


def is_picture(file):
    return file.read_bytes().startswith(PNG) and file.stat().st_size > 5_000


def test_one_line_changes_the_placement_and_no_bit():
    printed, _ = run("one_line.py")
    for devices in (4, 2, 1):
        assert f"4 replicas on {devices} cpu device" in printed
    for kind in ("sequential", "functional", "Subclassed"):
        lines = re.findall(rf"{kind} +evaluate ([\d.]+)% +predict ([\d.]+)% +([0-9a-f]{{32}})", printed)
        assert len(lines) == 3
        assert len(set(lines)) == 1
        evaluated, predicted, _ = lines[0]
        assert evaluated == predicted
        assert float(evaluated) > 95


def test_half_precision_prints_its_dtypes():
    printed, _ = run("mixed_precision.py")
    bfloat16, float16 = printed.split("mixed_bfloat16\n")[1].split("mixed_float16\n")
    for half, text in (("bfloat16", bfloat16), ("float16", float16)):
        assert f"hidden computes in {half}, its variables are float32" in text
        assert "logits computes in float32, its variables are float32" in text
        lines = re.findall(r"on [12]: accuracy ([\d.]+)%, ([0-9a-f]{32})", text)
        assert len(lines) == 2
        assert lines[0] == lines[1]
        assert float(lines[0][0]) > 95
    assert "no loss scale" in bfloat16
    assert re.search(r"loss scale \d+", float16)


def test_fit_and_loop_end_with_the_same_bits_and_the_wrong_loop_is_refused(tmp_path):
    picture = tmp_path / "curves.png"
    printed, _ = run("cifar_fit_and_loop.py", "--seeds", str(SEEDS), "--picture", str(picture))
    assert "is refused:\n  An array of shape (128, 8, 8, 1) reaches replica code as an argument" in printed
    seen = re.findall(r"^(.+?) +seed (\d)  validation accuracy ([\d.]+)%  ([0-9a-f]{32})$", printed, re.MULTILINE)
    runs = {name: [line[1:] for line in seen if line[0] == name] for name in ("fit", "loop", "loop, not distributed")}
    assert [len(lines) for lines in runs.values()] == [SEEDS] * 3
    assert runs["fit"] == runs["loop"]
    assert len({fingerprint for *_, fingerprint in seen}) == 2 * SEEDS
    assert min(float(accuracy) for _, accuracy, _ in runs["loop"]) > 85
    assert f"fit and loop have the same fingerprint for {SEEDS} of {SEEDS} seeds" in printed
    means = {}
    for name, lines in runs.items():
        last = [float(accuracy) for _, accuracy, _ in lines]
        means[name] = statistics.mean(last), statistics.stdev(last)
        line = re.search(rf"^{name} +validation accuracy ([\d.]+)% \+- ([\d.]+)%$", printed, re.MULTILINE)
        assert [float(number) for number in line.groups()] == pytest.approx(means[name], abs=0.06)
    verdict = re.search(
        r"^(A|No) gap between right and wrong loop on this data: ([\d.]+) points, spread ([\d.]+)", printed, re.MULTILINE
    )
    (right, of_right), (wrong, of_wrong) = means["loop"], means["loop, not distributed"]
    assert [float(verdict[2]), float(verdict[3])] == pytest.approx([abs(right - wrong), of_right + of_wrong], abs=0.16)
    assert (verdict[1] == "A") == (float(verdict[2]) > float(verdict[3]))
    assert is_picture(picture)


def test_the_tutorial_of_custom_loops_learns_in_each_shape_of_loop():
    printed, _ = run("fashion_mnist_loop.py", silently=True)
    rows = re.findall(r"(.+?) +loss ([\d.]+)  accuracy ([\d.]+)%  test loss ([\d.]+)  test accuracy ([\d.]+)%", printed)
    assert [name.strip() for name, *_ in rows] == [*(f"epoch {i}" for i in range(1, 6)), "ten steps", "one epoch"]
    losses = [float(loss) for _, loss, *_ in rows]
    assert losses == sorted(losses, reverse=True)
    assert float(rows[-1][-1]) > 75
    assert f"restored without a strategy: test accuracy {rows[4][-1]}%\n" in printed
    assert "a replica's share  1.25, 2.25\n" in printed
    assert "loss of the batch  3.5\n" in printed
    assert "mean of the shares 1.75" in printed


def test_three_loads_of_a_model_evaluate_the_same(tmp_path):
    printed, _ = run("mnist_fit.py", "--directory", str(tmp_path), silently=True)
    names = ("the latest weights", "exported, loaded without a strategy", "exported, loaded with one")
    lines = [re.search(rf"^{name} +loss ([\d.]+)  accuracy ([\d.]+)%$", printed, re.MULTILINE) for name in names]
    assert len({line.groups() for line in lines if line}) == 1
    assert None not in lines
    assert float(lines[0][2]) > 80
    assert (
        re.findall(r"Learning rate for epoch \d+ is ([\d.]+)", printed) == ["0.001000"] * 3 + ["0.000100"] * 4 + ["0.000010"] * 5
    )
    assert len(list((tmp_path / "training_checkpoints").glob("*.weights.h5"))) == 12
    assert list((tmp_path / "logs").rglob("*tfevents*"))


def test_accumulation_changes_no_curve_and_its_placement_no_bit(tmp_path):
    picture = tmp_path / "curves.png"
    printed, _ = run("accumulation.py", "--picture", str(picture))
    assert len(re.findall(r"final loss 0\.\d+, mean of 3 runs", printed)) == 4
    difference = re.search(r"largest difference between the final losses of a run: (\S+)", printed)
    assert difference is not None
    assert float(difference[1]) < 1e-5
    bits = re.findall(r"run \d  ([0-9a-f]{32})  ([0-9a-f]{32})  the same bits", printed)
    assert len(bits) == 3
    assert all(one == other for one, other in bits)
    assert len({one for one, _ in bits}) == 3
    assert is_picture(picture)


def test_a_fit_in_several_processes_one_of_which_is_killed(tmp_path):
    programs = kept_in(tmp_path / "programs")
    alone, _ = run("multi_worker_fit.py", "--backup", str(tmp_path / "alone"))
    options = "--backup", str(tmp_path / "launched"), "--kill-at", "15"
    killed, said = run("multi_worker_fit.py", *options, launch=(*LAUNCHED, "--restarts", "1"), silently=True, **programs)
    bits = re.findall(r"process \d of \d: 8 replicas, test accuracy ([\d.]+)%, fingerprint ([0-9a-f]{32})", alone + killed)
    assert len(bits) == 3
    assert len(set(bits)) == 1
    assert float(bits[0][0]) > 90
    assert "process 1 was killed by SIGKILL.\nunisono launch: restart 1 of 1, with 2 processes." in said


def test_a_loop_goes_on_in_several_processes(tmp_path):
    directory = str(tmp_path / "ckpts")
    alone, _ = run("multi_worker_loop.py", "--checkpoints", directory)
    accuracies = [float(percent) for percent in re.findall(r"epoch \d: loss [\d.]+, accuracy ([\d.]+)%", alone)]
    assert accuracies == sorted(accuracies)
    assert accuracies[-1] > 75
    shutil.rmtree(f"{directory}/ckpt_5")
    goes_on, _ = run("multi_worker_loop.py", "--checkpoints", directory, launch=LAUNCHED)
    (fingerprint,) = re.findall(r"fingerprint ([0-9a-f]{32})", alone)
    assert re.findall(r"fingerprint ([0-9a-f]{32})", goes_on) == [fingerprint] * 2
    assert re.findall(r"epoch (\d)", goes_on) == ["5"]


def test_two_networks_train_each_other(tmp_path):
    picture = tmp_path / "gan.png"
    printed, _ = run("gan.py", "--picture", str(picture))
    right = [int(percent) for percent in re.findall(r"\((\d+)% right\)", printed)]
    assert right[0] > 70 > right[-1]
    assert is_picture(picture)


def run_on_both_placements(name, *arguments, **variables):
    """Run an example on one device and on two; return what the two have printed, and check that both fingerprints are equal."""
    printed = [run(name, "--devices", devices, *arguments, silently=True, **variables)[0] for devices in ("1", "2")]
    one, two = (re.findall(r"[0-9a-f]{32}", text) for text in printed)
    assert one == two != []
    return printed[0]


def read_parts(printed):
    """Return the table of the fine-tuning: for each part the losses and the accuracy in per cent."""
    lines = re.findall(r"^(.+?) +[\d,]+ weights  loss ([\d.]+) -> ([\d.]+)  [a-z ]+ +([\d.]+)%", printed, re.MULTILINE)
    parts = {name: tuple(map(float, numbers)) for name, *numbers in lines}
    assert list(parts) == ["pre-training", "head, encoder frozen", "all, encoder unfrozen", "all, without pre-training"]
    return parts


def test_fine_tuning_learns():
    printed, _ = run("fine_tuning.py", "--epochs", "3")
    assert all(last < first for first, last, _ in read_parts(printed).values())


def test_fine_tuning_has_the_same_bits_on_both_placements(tmp_path):
    run_on_both_placements("fine_tuning.py", "--epochs", "3", **kept_in(tmp_path))


def test_a_pre_trained_encoder_knows_the_names_of_the_test():
    printed, _ = run("fine_tuning.py")
    parts = read_parts(printed)
    assert all(last < first for first, last, _ in parts.values())
    frozen, unfrozen, without = (parts[name][-1] for name in list(parts)[1:])
    assert frozen > 70
    assert unfrozen > frozen
    assert without < 50


IMAGES = ("image_classification.py", "--epochs", "1", "--pictures", "192", "--picture")


@pytest.mark.compat
def test_images_from_grain_are_classified(tmp_path):
    pytest.importorskip("grain")
    name, *options = IMAGES
    run(name, *options, str(tmp_path / "result.png"), silently=True)
    assert is_picture(tmp_path / "result.png")


@pytest.mark.compat
def test_images_from_grain_have_the_same_bits_on_both_placements(tmp_path):
    pytest.importorskip("grain")
    run_on_both_placements(*IMAGES, str(tmp_path / "result.png"), **kept_in(tmp_path / "programs"))


def test_a_net_of_keras_applications_learns_shapes(tmp_path):
    pytest.importorskip("grain")
    picture = tmp_path / "result.png"
    printed, _ = run("image_classification.py", "--picture", str(picture))
    losses = [float(loss) for loss in re.findall(r" loss: ([\d.]+)", printed)]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 8
    assert float(re.search(r"test accuracy ([\d.]+)%, by guessing 12.5%", printed)[1]) > 80
    assert is_picture(picture)


def read_language_model(*arguments, **variables):
    """Return (losses of the epochs on held out text, characters that are right, characters by guessing)."""
    printed, _ = run("language_model.py", *arguments, silently=True, **variables)
    (whole,) = re.findall(r"^whole .* ([0-9a-f]{32})$", printed, re.MULTILINE)
    (resumed,) = re.findall(r"^resumed .* ([0-9a-f]{32})$", printed, re.MULTILINE)
    assert whole == resumed
    assert re.search(r"^killed .* none: SIGKILL$", printed, re.MULTILINE)
    assert "The resumed run has the bits of the whole one." in printed
    right, guessed = re.findall(r"right: ([\d.]+)%; always the most frequent one: ([\d.]+)%", printed)[0]
    return [float(loss) for loss in re.findall(r" val_loss: ([\d.]+)", printed)], float(right), float(guessed)


def test_a_language_model_that_is_killed_resumes_with_the_same_bits(tmp_path):
    losses, *_ = read_language_model("--steps", "6", **kept_in(tmp_path))
    assert losses == sorted(losses, reverse=True)


def test_a_language_model_learns_to_predict_characters():
    losses, right, guessed = read_language_model()
    assert losses == sorted(losses, reverse=True)
    assert right > 40 > 2 * guessed
