// A loop over steps whose rows do not meet: a recurrent layer, forward or backward. A piece of rows runs through all steps by itself.
//
// The step is a program of instructions on rows. Python writes it (`unisono/_src/kernels/native/row_loops.py`): the words here and there are the same.
#include <utility>
#include <vector>

#include "arguments.h"
#include "elementwise.h"
#include "lines_ahead.h"

namespace unisono {

constexpr int64_t ROWS_OF_A_PIECE = 16;
constexpr int64_t DEPTH_AT_ONCE = 128;  // of a product: a panel stays in the nearest cache for all rows of the piece
constexpr int64_t BLOCK_FLOATS = 1024;  // of a value at a time, so that the values of a step stay in the nearest cache

enum Operation : int64_t {
  COPY, LOAD_TRUTH, STORE_TRUTH, PRODUCT, SELECT,
  ADD, SUBTRACT, MULTIPLY, DIVIDE, LARGER, SMALLER,
  EQUAL, UNEQUAL, LESS, LESS_OR_EQUAL,
  NEGATE, ABSOLUTE, EXPONENTIAL, TANGENT, LOGISTIC, SQUARE_ROOT,
};

enum Kind : int64_t {
  NUMBER,   // the same for all rows
  SHARED,   // a row that is the same for all rows
  FIXED,    // rows that are the same at every step
  PLACE,    // rows of a step
  CARRY,    // rows of the step before
  NEXT,     // rows for the next step
  RESULT,   // rows that a step writes
  KEPT,     // rows of this step
  LOCAL,    // rows of this step that no product reads or writes
};

struct Operand {
  int64_t kind;
  int64_t index;
  int64_t offset;     // in a row
  int64_t is_number;  // one element for the whole row
};

struct Instruction {
  int64_t operation;
  int64_t width;
  Operand to;
  Operand a;
  Operand b;  // of a product: the number of the matrix, its depth, and whether it is transposed
  Operand c;
};

static_assert(sizeof(Instruction) == 18 * sizeof(int64_t));

struct Buffer {
  void* data;
  int64_t width;  // elements of a row
  int64_t bytes = 0;  // of a row
};

inline Buffer divide_into_rows(const ffi::AnyBuffer& array, int64_t rows) {
  return {array.untyped_data(), static_cast<int64_t>(array.element_count()) / rows, static_cast<int64_t>(array.size_bytes()) / rows};
}

struct Loop {
  int64_t rows;
  int64_t steps;
  bool is_reversed;
  std::vector<Buffer> firsts, places, fixed, shared, lasts, results;
  std::vector<const float*> matrices;  // in panels
  ffi::Span<const float> numbers;
  Integers kept_widths, local_widths;
  std::vector<Instruction> instructions;
};

// The memory of one piece of rows.
class Piece {
 public:
  Piece(const Loop& loop, int64_t begin, int64_t end) : loop_(loop), begin_(begin), rows_(end - begin), block_rows_(count_block_rows()) {
    int64_t floats = 0;
    const auto reserve = [&](int64_t width, int64_t rows) { return std::exchange(floats, floats + (width * rows + 15) / 16 * 16); };
    std::vector<int64_t> places;
    for (int copy = 0; copy < 2; copy++)
      for (const Buffer& first : loop.firsts) places.push_back(reserve(first.width, rows_));
    for (int64_t width : loop.kept_widths) places.push_back(reserve(width, rows_));
    for (int64_t width : loop.local_widths) places.push_back(reserve(width, block_rows_));
    int64_t deepest = 0;
    for (const Instruction& step : loop.instructions)
      if (step.operation == PRODUCT) deepest = std::max(deepest, step.b.offset);
    const int64_t left = reserve(deepest + ROW_GAP, rows_);
    float* memory = block_scratch().get(floats);
    left_ = memory + left;
    auto place = places.begin();
    for (auto* pointers : {&carries_[0], &carries_[1]})
      for (size_t i = 0; i < loop.firsts.size(); i++) pointers->push_back(memory + *place++);
    for (size_t i = 0; i < loop.kept_widths.size(); i++) kept_.push_back(memory + *place++);
    for (size_t i = 0; i < loop.local_widths.size(); i++) locals_.push_back(memory + *place++);
  }

  void run() {
    for (size_t i = 0; i < loop_.firsts.size(); i++) {
      const auto [data, width, bytes] = loop_.firsts[i];
      std::memcpy(carries_[0][i], static_cast<const float*>(data) + begin_ * width, rows_ * bytes);
    }
    for (int64_t step = 0; step < loop_.steps; step++) {
      step_ = number_step(step);
      fetch_rows_of(step + 1);
      run_step();
      std::swap(carries_[0], carries_[1]);
    }
    for (size_t i = 0; i < loop_.lasts.size(); i++) {
      const auto [data, width, bytes] = loop_.lasts[i];
      std::memcpy(static_cast<float*>(data) + begin_ * width, carries_[0][i], rows_ * bytes);
    }
  }

 private:
  int64_t number_step(int64_t step) const { return loop_.is_reversed ? loop_.steps - 1 - step : step; }

  // Lets the next products fetch what a step reads and writes.
  void fetch_rows_of(int64_t step) {
    ahead_.clear();
    if (step == loop_.steps) return;
    const int64_t first = number_step(step) * loop_.rows + begin_;
    for (const auto* buffers : {&loop_.places, &loop_.results})
      for (const Buffer& buffer : *buffers) ahead_.add(static_cast<const char*>(buffer.data) + first * buffer.bytes, rows_ * buffer.bytes);
  }

  int64_t count_block_rows() const {
    int64_t widest = 1;
    for (const Instruction& step : loop_.instructions)
      if (step.operation != PRODUCT) widest = std::max(widest, step.width);
    return std::clamp<int64_t>(BLOCK_FLOATS / widest, 1, rows_);
  }

  // What stands between two products runs over some rows at a time.
  void run_step() {
    const auto& steps = loop_.instructions;
    for (size_t first = 0; first < steps.size();) {
      if (steps[first].operation == PRODUCT) {
        multiply(steps[first++]);
        continue;
      }
      size_t last = first;
      while (last < steps.size() && steps[last].operation != PRODUCT) last++;
      for (int64_t row = 0; row < rows_; row += block_rows_)
        for (size_t i = first; i < last; i++) run(steps[i], row, std::min(block_rows_, rows_ - row));
      first = last;
    }
  }

  void multiply(const Instruction& step) {
    const int64_t depth = step.b.offset;
    const Rows left = find_rows(step.a, 0);
    const int64_t left_row = depth + ROW_GAP;
    for (int64_t i = 0; i < rows_; i++) std::memcpy(left_ + i * left_row, left.first + i * left.distance, depth * sizeof(float));
    const Rows to = find_rows(step.to, 0);
    const float* panels = loop_.matrices[step.b.index];
    for (int64_t k = 0; k == 0 || k < depth; k += DEPTH_AT_ONCE) {
      const int64_t count = std::min(DEPTH_AT_ONCE, depth - k);
      for (int64_t column = 0; column < step.width; column += TILE_COLUMNS) {
        const float* panel = panels + column * depth + k * TILE_COLUMNS;
        float* result = const_cast<float*>(to.first) + column;
        const int64_t width = std::min<int64_t>(TILE_COLUMNS, step.width - column);
        if (k == 0)
          multiply_panel<false, true>(rows_, count, left_, left_row, panel, result, to.distance, width, nullptr, ahead_);
        else
          multiply_panel<true, true>(rows_, count, left_ + k, left_row, panel, result, to.distance, width, nullptr, ahead_);
      }
    }
  }

  // Returns an operand's rows from `row` on.
  Rows find_rows(const Operand& operand, int64_t row) const {
    const auto in_buffer = [&](const Buffer& buffer, int64_t number) {
      return Rows{static_cast<const float*>(buffer.data) + number * buffer.width + operand.offset, buffer.width, operand.is_number != 0};
    };
    switch (operand.kind) {
      case NUMBER: return {loop_.numbers.begin() + operand.index, 0, true};
      case SHARED: return {static_cast<const float*>(loop_.shared[operand.index].data) + operand.offset, 0, operand.is_number != 0};
      case FIXED: return in_buffer(loop_.fixed[operand.index], begin_ + row);
      case PLACE: return in_buffer(loop_.places[operand.index], number_row(row));
      case RESULT: return in_buffer(loop_.results[operand.index], number_row(row));
      case CARRY: return in_buffer({carries_[0][operand.index], loop_.firsts[operand.index].width}, row);
      case NEXT: return in_buffer({carries_[1][operand.index], loop_.firsts[operand.index].width}, row);
      case KEPT: return in_buffer({kept_[operand.index], loop_.kept_widths[operand.index]}, row);
      default: return in_buffer({locals_[operand.index], loop_.local_widths[operand.index]}, 0);
    }
  }

  int64_t number_row(int64_t row) const { return step_ * loop_.rows + begin_ + row; }

  void run(const Instruction& step, int64_t row, int64_t rows) {
    if (step.operation == LOAD_TRUTH) return load_truth(step, row, rows);
    if (step.operation == STORE_TRUTH) return store_truth(step, row, rows);
    const Rows result = find_rows(step.to, row);
    float* to = const_cast<float*>(result.first);
    const Rows a = find_rows(step.a, row);
    const auto map_one = [&](const auto& f) { map_rows(f, a, to, result.distance, rows, step.width); };
    const auto map_two = [&](const auto& f) { map_rows(f, a, find_rows(step.b, row), to, result.distance, rows, step.width); };
    switch (step.operation) {
      case COPY: return map_one([](Vector x) { return x; });
      case NEGATE: return map_one([](Vector x) { return -x; });
      case ABSOLUTE: return map_one(absolute);
      case EXPONENTIAL: return map_one(exponential);
      case TANGENT: return map_one(tangent);
      case LOGISTIC: return map_one(logistic);
      case SQUARE_ROOT: return map_one(square_root);
      case ADD: return map_two([](Vector x, Vector y) { return x + y; });
      case SUBTRACT: return map_two([](Vector x, Vector y) { return x - y; });
      case MULTIPLY: return map_two([](Vector x, Vector y) { return x * y; });
      case DIVIDE: return map_two([](Vector x, Vector y) { return x / y; });
      case LARGER: return map_two(larger);
      case SMALLER: return map_two(smaller);
      case EQUAL: return map_two([](Vector x, Vector y) { return to_truth(x == y); });
      case UNEQUAL: return map_two([](Vector x, Vector y) { return to_truth(x != y); });
      case LESS: return map_two([](Vector x, Vector y) { return to_truth(x < y); });
      case LESS_OR_EQUAL: return map_two([](Vector x, Vector y) { return to_truth(x <= y); });
      case SELECT: return choose_rows(a, find_rows(step.b, row), find_rows(step.c, row), to, result.distance, rows, step.width);
    }
  }

  // Truth is a byte in arrays, and 0 or 1 as a float in between.
  void load_truth(const Instruction& step, int64_t row, int64_t rows) {
    const bool is_fixed = step.a.kind == FIXED;
    const Buffer& buffer = (is_fixed ? loop_.fixed : loop_.places)[step.a.index];
    const auto* from = static_cast<const uint8_t*>(buffer.data) + (is_fixed ? begin_ + row : number_row(row)) * buffer.width + step.a.offset;
    const Rows result = find_rows(step.to, row);
    for (int64_t i = 0; i < rows; i++) {
      float* to = const_cast<float*>(result.first) + i * result.distance;
      for (int64_t j = 0; j < step.width; j++) to[j] = from[i * buffer.width + j];
    }
  }

  void store_truth(const Instruction& step, int64_t row, int64_t rows) {
    const Buffer& buffer = loop_.results[step.to.index];
    auto* to = static_cast<uint8_t*>(buffer.data) + number_row(row) * buffer.width + step.to.offset;
    const Rows from = find_rows(step.a, row);
    for (int64_t i = 0; i < rows; i++) {
      const float* x = from.first + i * from.distance;
      if (from.is_number)
        std::memset(to + i * buffer.width, *x != 0.0f, step.width);
      else
        for (int64_t j = 0; j < step.width; j++) to[i * buffer.width + j] = x[j] != 0.0f;
    }
  }

  const Loop& loop_;
  const int64_t begin_;
  const int64_t rows_;
  const int64_t block_rows_;
  int64_t step_ = 0;
  float* left_;
  LinesAhead ahead_;
  std::vector<float*> carries_[2], kept_, locals_;
};

// Packs the matrices of all products: [depth][columns], or [columns][depth] if it is read transposed.
static void pack_matrices(ffi::ThreadPool& pool, const std::vector<ffi::AnyBuffer>& matrices, Integers transposed, Loop& loop) {
  struct Panels {
    const float* from;
    int64_t depth;
    int64_t columns;
    bool is_transposed;
    float* to;
  };
  std::vector<Panels> all;
  int64_t floats = 0;
  for (size_t i = 0; i < matrices.size(); i++) {
    const auto sizes = matrices[i].dimensions();
    const bool is_transposed = transposed[i] != 0;
    all.push_back({static_cast<const float*>(matrices[i].untyped_data()), sizes[is_transposed], sizes[!is_transposed], is_transposed, nullptr});
    floats += all.back().depth * count_panels(all.back().columns) * TILE_COLUMNS;
  }
  float* memory = packed_scratch().get(floats);
  for (Panels& matrix : all) {
    matrix.to = memory;
    loop.matrices.push_back(memory);
    memory += matrix.depth * count_panels(matrix.columns) * TILE_COLUMNS;
    run_pieces(pool, matrix.depth * count_panels(matrix.columns) > FEW_TO_PACK ? count_panels(matrix.columns) : 1, [&](int64_t piece) {
      const bool is_whole = matrix.depth * count_panels(matrix.columns) <= FEW_TO_PACK;
      for (int64_t panel = is_whole ? 0 : piece; panel < (is_whole ? count_panels(matrix.columns) : piece + 1); panel++) {
        float* to = matrix.to + panel * matrix.depth * TILE_COLUMNS;
        if (matrix.is_transposed)
          pack_transposed_panel(matrix.from, matrix.depth, matrix.columns, panel, to);
        else
          pack_panel(matrix.from, matrix.depth, matrix.columns, panel, to);
      }
    });
  }
}

// counts: of carries, places, fixed arrays, shared rows, matrices and results.
static ffi::Error RunRowLoop(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets returned, Integers counts, int64_t rows,
                             int64_t steps, bool is_reversed, Integers program, ffi::Span<const float> numbers, Integers transposed,
                             Integers kept_widths, Integers local_widths) {
  if (counts.size() != 6 || program.size() % 18 != 0 || static_cast<int64_t>(returned.size()) != counts[0] + counts[5] ||
      static_cast<int64_t>(arguments.size()) != counts[0] + counts[1] + counts[2] + counts[3] + counts[4])
    return ffi::Error::InvalidArgument("The arguments of a loop over rows do not fit its counts.");
  return run_kernel("unisono_run_row_loop", [&] {
    Loop loop{rows, steps, is_reversed, {}, {}, {}, {}, {}, {}, {}, numbers, kept_widths, local_widths, {}};
    size_t next = 0;
    const auto take = [&](int64_t count, int64_t all_rows, std::vector<Buffer>& to) {
      for (int64_t i = 0; i < count; i++) {
        const auto array = *arguments.get<ffi::AnyBuffer>(next++);
        to.push_back(divide_into_rows(array, all_rows));
      }
    };
    take(counts[0], rows, loop.firsts);
    take(counts[1], rows * steps, loop.places);
    take(counts[2], rows, loop.fixed);
    take(counts[3], 1, loop.shared);
    std::vector<ffi::AnyBuffer> matrices;
    for (int64_t i = 0; i < counts[4]; i++) matrices.push_back(*arguments.get<ffi::AnyBuffer>(next++));
    std::vector<Memory> written;
    for (int64_t i = 0; i < counts[0] + counts[5]; i++) {
      auto array = *returned.get<ffi::AnyBuffer>(i);
      written.push_back(memory_of(*array));
      const bool is_last = i < counts[0];
      const int64_t all_rows = is_last ? rows : rows * steps;
      (is_last ? loop.lasts : loop.results).push_back(divide_into_rows(*array, all_rows));
    }
    prefer_large_pages(written);
    loop.instructions.resize(program.size() / 18);
    std::memcpy(loop.instructions.data(), program.begin(), program.size() * sizeof(int64_t));
    pack_matrices(pool, matrices, transposed, loop);
    run_pieces(pool, divide_up(rows, ROWS_OF_A_PIECE), [&](int64_t number) {
      Piece(loop, number * ROWS_OF_A_PIECE, std::min(rows, (number + 1) * ROWS_OF_A_PIECE)).run();
    });
  });
}

}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_run_row_loop, unisono::RunRowLoop,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<unisono::Integers>("counts")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("steps")
                                  .Attr<bool>("is_reversed")
                                  .Attr<unisono::Integers>("program")
                                  .Attr<xla::ffi::Span<const float>>("numbers")
                                  .Attr<unisono::Integers>("transposed")
                                  .Attr<unisono::Integers>("kept_widths")
                                  .Attr<unisono::Integers>("local_widths"));
#pragma GCC visibility pop
