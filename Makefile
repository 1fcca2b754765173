# The commands of a newcomer; CMakePresets.json has the rest. Every target first installs what is missing.
BUILD := build/release
JOBS := $(shell nproc)
NINJA_PROGRESS := NINJA_STATUS="[%f/%t, %es] "

.DEFAULT_GOAL := help
.PHONY: help setup build train test cuda bench lint docs bundle carry consumer headers clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/\1\t\2/' | \
	  awk -F'\t' '{printf "make %-10s %s\n", $$1, $$2}'

setup: ## install Debian packages and .venv (LibTorch, oneTBB, safetensors) where missing
	@scripts/setup.sh

$(BUILD)/build.ninja: CMakePresets.json | setup
	@cmake --preset release

build: setup $(BUILD)/build.ninja ## build the library, the examples and the tools; `make test` builds the tests
	@$(NINJA_PROGRESS) cmake --build --preset release -j $(JOBS) --target programs

train: setup $(BUILD)/build.ninja ## train a GPT on real text for a minute, over two ranks with sharded optimizer state
	@$(NINJA_PROGRESS) cmake --build --preset release -j $(JOBS) --target train_gpt
	@$(BUILD)/examples/train_gpt --ranks 2 --stage 1 --steps 3000 --seconds 60 --sample 400

test: setup $(BUILD)/build.ninja ## build and run all tests but those of the benches (STRICT=--strict: as CI does)
	@$(NINJA_PROGRESS) cmake --build --preset release -j $(JOBS) --target tests
	@scripts/run_tests.sh $(STRICT) release $$((4 * $(JOBS))) -LE bench

cuda: ## build everything with the CUDA runtime, for sm_80 and sm_90, in build/cuda; its tests need a GPU
	@scripts/setup.sh --cuda
	@cmake --preset cuda
	@$(NINJA_PROGRESS) cmake --build --preset cuda -j $(JOBS)

bench: setup $(BUILD)/build.ninja ## time collectives against c10d's Gloo, on an idle machine
	@$(NINJA_PROGRESS) cmake --build --preset release -j $(JOBS) --target collectives
	@$(BUILD)/bench/collectives --ranks 2
	@$(BUILD)/bench/collectives --ranks 4

lint: ## check formatting, include arrows and file lengths, then clang-tidy (slow)
	@scripts/setup.sh --lint
	@scripts/lint.sh

docs: ## write the API reference to build/docs/html, by Doxygen
	@scripts/setup.sh --docs
	@scripts/docs.sh

bundle: setup ## pack the non-torch libraries into bundle/, for machines without a network
	@scripts/bundle.sh

carry: ## pack what scripts/check_gpu.sh runs into carry/zeropage.tar.xz, built for sm_90: for machines with a GPU and torch
	@scripts/setup.sh --cuda
	@scripts/carry.sh --jobs $(JOBS)

consumer: build ## install into build/install, and build and run the program of docs/getting_started.md against it
	@scripts/check_consumer.sh

headers: build ## the same, and compile each public header alone against the installation (4 minutes)
	@scripts/check_consumer.sh --headers

clean: ## remove build/, bundle/ and carry/ (.venv stays)
	@rm -rf build bundle carry
