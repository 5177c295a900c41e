# Sourced with the name of a folder in build/ and settings of setup.py: builds the CPU kernels so, in a copy of the sources
# in that folder, and goes there. $python is the environment's.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$PWD/.venv/bin/python
folder=$PWD/build/$1
mkdir -p "$folder"
rm -rf "$folder"/{csrc,cuda,fmoe_ext,tests}
# -a keeps the times of the files, so that the second time compiles what has changed only
cp -a setup.py pyproject.toml README.md LICENSE csrc cuda fmoe_ext tests "$folder/"
find "$folder/fmoe_ext" -name '*.so' -delete
cd "$folder"
env "${@:2}" FMOE_CUDA=0 "$python" setup.py -q build_ext --inplace
