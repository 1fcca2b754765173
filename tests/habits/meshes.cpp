// How scripts put ranks on a grid, and train along its axes.
#include <sstream>

#include "tests/habits/scripts.h"
#include "zeropage/context_parallel.h"
#include "zeropage/expert_parallel.h"
#include "zeropage/tensor_parallel.h"

namespace zeropage::habits_of_meshes {
namespace {

using namespace zeropage::testing;

constexpr const char* kGroup = "Ranks on a grid";

const auto kScript = [](auto& run) {
  auto model = run.wrap(make<Mlp>());
  auto optimizer = run.template optimizer<AdamW>(model, AdamWOptions(0.01));
  train_steps(run, model, *optimizer);
  return everything(run, model);
};

const int kAlongAnAxis =
    add_habit({kGroup, "trains a copy of the model along one axis of a mesh", "", [] {
                 constexpr int kPlaces = 2;
                 for (const int stage : {0, 1, 2, 3}) {
                   const Setting setting{.stage = stage, .mode = Mode::kFp32, .ranks = 2};
                   SCOPED_TRACE(::testing::Message() << setting);
                   const auto expected = values_of_ranks(
                       setting, kScript, [&](World& world) { return PlainRun(world, setting); });
                   std::vector<std::vector<Values>> by_tensor(kPlaces, std::vector<Values>(2));
                   run_ranks(2 * kPlaces, [&](World& world) {
                     const Mesh mesh(world, {{"data", 2}, {"tensor", kPlaces}});
                     World data = mesh["data"];
                     OurRun run(data, setting);
                     const auto tensor = static_cast<size_t>(mesh["tensor"].rank());
                     by_tensor[tensor][static_cast<size_t>(data.rank())] = kScript(run);
                   });
                   for (const auto& actual : by_tensor) expect_alike(expected, actual, setting, 0);
                 }
               }});

const int kNoGrid =
    is_refused(kGroup, "makes a mesh whose sizes do not multiply to the number of ranks",
               "need more than 2 ranks, but the world has 2", "make them multiply to it",
               [](auto& run) {
                 Mesh(run.world(), {{"data", 2}, {"tensor", 2}});
               },
               {.stages = {0}});

const int kTwice = is_refused(kGroup, "names two axes of a mesh alike", "\"data\" is there twice",
                              "choose another name",
                              [](auto& run) {
                                Mesh(run.world(), {{"data", 2}, {"data", 1}});
                              },
                              {.stages = {0}});

// Two ranks that have half of the tokens each; `change` gets what the script's attention returns.
struct AttentiveImpl : torch::nn::Module {
  AttentiveImpl() { linear = register_module("linear", torch::nn::Linear(8, 24)); }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto parts = linear(x).view({x.size(0), x.size(1), 2, 12}).transpose(1, 2).chunk(3, -1);
    if (by_hand) {
      return torch::matmul(torch::softmax(torch::matmul(parts[0], parts[1].mT()), -1), parts[2]);
    }
    return torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, true);
  }
  torch::nn::Linear linear{nullptr};
  bool by_hand = false;
};
TORCH_MODULE(Attentive);

torch::Tensor tokens_of(int step) {
  return torch::linspace(-1, 1 + step, 2 * 8 * 8).view({2, 8, 8}).to(torch::kFloat);
}

const int kContext = add_habit(
    {kGroup, "splits sequences over an axis \"context\" and trains a marked module", "", [] {
       for (const int stage : {0, 1, 2, 3}) {
         SCOPED_TRACE(::testing::Message() << "stage " << stage);
         Attentive plain = make<Attentive>();
         torch::optim::SGD by_hand(plain->parameters(), SGDOptions(0.1));
         for (int step = 0; step < 3; ++step) {
           plain(tokens_of(step)).square().mean().backward();
           by_hand.step();
           by_hand.zero_grad();
         }
         run_ranks(2, [&](World& world) {
           const Setting setting{.stage = stage, .mode = Mode::kFp32, .ranks = 2};
           const Mesh mesh(world, {{"data", 1}, {"context", 2}});
           Attentive marked = make<Attentive>();
           parallel::context_parallel(marked, mesh["context"]);
           const OurRun run(world, setting);
           DistributedDataParallel<Attentive> model(marked, mesh, run.options);
           Optimizer<SGD> optimizer(model, SGDOptions(0.1));
           for (int step = 0; step < 3; ++step) {
             const auto x = parallel::split_context(tokens_of(step), 1, mesh["context"]);
             model(x).square().mean().backward();
             optimizer.step();
             optimizer.zero_grad();
           }
           size_t index = 0;
           visit_parameters(model, [&](const std::string& name, const torch::Tensor& is) {
             EXPECT_TRUE(torch::allclose(is, plain->parameters()[index++], 1e-5, 1e-6)) << name;
           });
         });
       }
     }});

struct RoutedImpl : torch::nn::Module {
  RoutedImpl() {
    experts = register_module("experts", parallel::Experts(parallel::ExpertsOptions(8, 12, 4, 2)));
    last = register_module("last", torch::nn::Linear(8, 8));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(x + experts(x)); }
  parallel::Experts experts{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Routed);

const int kExperts = add_habit(
    {kGroup, "spreads experts over an axis \"expert\", and each rank has its own batches", "", [] {
       const auto batch = [](int step, int rank) { return tokens_of(step) * (1 + rank); };
       for (const int stage : {0, 1, 2, 3}) {
         SCOPED_TRACE(::testing::Message() << "stage " << stage);
         Routed plain = make<Routed>();
         torch::optim::SGD by_hand(plain->parameters(), SGDOptions(0.1));
         for (int step = 0; step < 3; ++step) {
           for (int rank = 0; rank < 2; ++rank) {
             (plain(batch(step, rank)).square().mean() / 2).backward();
           }
           by_hand.step();
           by_hand.zero_grad();
         }
         run_ranks(2, [&](World& world) {
           const Setting setting{.stage = stage, .mode = Mode::kFp32, .ranks = 2};
           const Mesh mesh(world, {{"data", 1}, {"expert", 2}});
           Routed spread = make<Routed>();
           expert_parallel(spread, mesh);
           const OurRun run(world, setting);
           DistributedDataParallel<Routed> model(spread, mesh, run.options);
           Optimizer<SGD> optimizer(model, SGDOptions(0.1));
           for (int step = 0; step < 3; ++step) {
             model(batch(step, world.rank())).square().mean().backward();
             optimizer.step();
             optimizer.zero_grad();
           }
           const auto state = full_state(model);
           for (const auto& expected : plain->named_parameters()) {
             if (world.rank() != 0) continue;
             EXPECT_TRUE(torch::allclose(state[expected.key()], expected.value(), 1e-5, 1e-6))
                 << expected.key();
           }
         });
       }
     }});

const int kWrittenOut =
    is_refused(kGroup, "writes attention out in a module that context_parallel() marked",
               "ran no scaled_dot_product_attention", "call that operator, or context_attention()",
               [](auto& run) {
                 Attentive marked = make<Attentive>();
                 marked->by_hand = true;
                 parallel::context_parallel(marked, run.world());
                 DistributedDataParallel<Attentive> model(marked, run.world(), run.options);
                 model(tokens_of(0));
               },
               {.stages = {0}});

const int kNoAxis = is_refused(kGroup, "asks a mesh for an axis that it does not have",
                               "no axis \"pipeline\" among \"data\" 1, \"tensor\" 2",
                               "the message lists those that it has; ask has() first",
                               [](auto& run) {
                                 const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
                                 static_cast<void>(mesh["pipeline"]);
                               },
                               {.stages = {0}});

const int kUnlike =
    is_refused(kGroup, "makes meshes whose axes differ between ranks",
               "rank 0 has axes: \"data\" 1, ", "give all ranks the same axes",
               [](auto& run) {
                 Mesh(run.world(), {{"data", 1 + run.rank()}, {"tensor", 2 - run.rank()}});
               },
               {.stages = {0}});

const int kAlone =
    is_refused(kGroup, "makes a mesh on rank 0 alone", "the mesh: ", "make it on all ranks",
               [](auto& run) {
                 if (run.rank() == 0) Mesh(run.world(), {{"data", 2}});
               },
               {.stages = {0}});

const int kNoGroups = is_refused(
    kGroup, "shards within groups of more ranks than there are, or that do not divide them",
    "2 ranks do not divide into groups of 4", "choose a divisor of the number of ranks",
    [](auto& run) {
      Options options;
      options.shard_within = 4;
      const DistributedDataParallel<Mlp> model(make<Mlp>(), run.world(), options);
    },
    {.stages = {1}});

const int kNotCut =
    is_refused(kGroup, "wraps a module over a mesh with an axis \"tensor\" without cutting it",
               "no parameter of the module is a slice", "call tensor_parallel() before wrapping",
               [](auto& run) {
                 const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
                 const DistributedDataParallel<Mlp> model(make<Mlp>(), mesh);
               },
               {.stages = {1}});

const int kSavesAPart = is_refused(
    kGroup, "saves a module that is cut over a mesh, but was wrapped over one axis",
    "each of 2 ranks has slices of parameters", "wrap it over the whole mesh", [](auto& run) {
      const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
      torch::nn::Sequential net(torch::nn::Linear(4, 4));
      tensor_parallel(net, mesh["tensor"], {{"0", Cut::column()}});
      DistributedDataParallel<torch::nn::Sequential> model(net, mesh["data"]);
      save_weights("nowhere", model);
    });

// ---- what ranks of a tensor-parallel group have alike ----

struct NetImpl : torch::nn::Module {
  NetImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({7})));
    up = register_module("up", torch::nn::Linear(7, 40));
    between = register_module("between", torch::nn::PReLU());
    down = register_module("down", torch::nn::Linear(40, 7));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor hidden = up(norm(x));
    return down(with_parameter_between ? between(hidden) : torch::relu(hidden));
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::PReLU between{nullptr};
  bool with_parameter_between = false;
};
TORCH_MODULE(Net);

Net cut_net(const Mesh& mesh) {
  Net net = make<Net>();
  tensor_parallel(net, mesh["tensor"], {{"up", Cut::column()}, {"down", Cut::row()}});
  return net;
}

// Two ranks that share slices; change(net): between the cut and the wrapper; step(model, step): before its backward.
template <typename Change, typename Before>
void train_cut(OurRun& run, const Change& change, const Before& before, bool clips,
               bool own_batch = false) {
  const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
  Net net = cut_net(mesh);
  change(net);
  DistributedDataParallel<Net> model(net, mesh, run.options);
  Optimizer<SGD> optimizer(model, SGDOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    before(model, step);
    const Samples samples = samples_of(own_batch ? run.rank() : 0, step);
    loss_against(model(samples.inputs), samples.targets).backward();
    if (clips) clip_grad_norm_(model, 0.5);
    optimizer.step();
  }
}

constexpr auto kNothing = [](auto&&...) {};
const RefusedOptions kFirstAndLast = {.stages = {0, 3}};

const int kOwnBatches = is_refused(
    kGroup, "gives ranks of a tensor-parallel group other batches, and clips",
    "gradients of whole parameters", "give them the same batches",
    [](auto& run) { train_cut(run, kNothing, kNothing, /*clips=*/true, /*own_batch=*/true); },
    kFirstAndLast);

const int kOwnBatchesUnclipped = is_refused(
    kGroup, "gives ranks of a tensor-parallel group other batches, and does not clip",
    "parameter \"norm.weight\": rank 0 has ", "give them the same batches",
    [](auto& run) { train_cut(run, kNothing, kNothing, /*clips=*/false, /*own_batch=*/true); });

const int kBetween = is_refused(
    kGroup, "has a parameter between a column and its row, and leaves it out of the plan",
    "gradients of whole parameters", "name its layer in the plan, as `Cut::between()`",
    [](auto& run) {
      train_cut(
          run, [](Net& net) { net->with_parameter_between = true; }, kNothing, /*clips=*/true);
    },
    kFirstAndLast);

const int kBetweenUnclipped = is_refused(
    kGroup, "has a parameter between a column and its row, and neither plans it nor clips",
    "column and its row in the plan, as Cut::between()",
    "name its layer in the plan, as `Cut::between()`", [](auto& run) {
      train_cut(
          run, [](Net& net) { net->with_parameter_between = true; }, kNothing, /*clips=*/false);
    });

const int kWritesByWorldRank = is_refused(
    kGroup, "writes to a whole parameter under a guard on world rank 0 of a tensor-parallel group",
    "parameter \"norm.weight\"", "write on all ranks along \"tensor\"",
    [](auto& run) {
      train_cut(
          run, kNothing,
          [&](auto& model, int step) {
            const torch::NoGradGuard no_grad;
            const GatheredParameters guard(model, Modified::on_rank(0));
            if (step == 1 && run.rank() == 0) model->norm->weight.fill_(0.5);
          },
          /*clips=*/false);
    },
    {.stages = {0}});

const int kInitialises = add_habit(
    {kGroup, "initialises whole layers anew by a seed of each rank, after tensor_parallel()", "",
     [] {
       for (const int stage : {0, 3}) {
         const Setting setting{.stage = stage, .mode = Mode::kFp32, .ranks = 2};
         SCOPED_TRACE(::testing::Message() << setting);
         std::vector<torch::Tensor> weights(2);
         run_ranks(2, [&](World& world) {
           OurRun run(world, setting);
           const Mesh mesh(world, {{"data", 1}, {"tensor", 2}});
           Net net = cut_net(mesh);
           {
             const torch::NoGradGuard no_grad;
             net->norm->weight.fill_(1 + world.rank());
           }
           DistributedDataParallel<Net> model(net, mesh, run.options);
           weights[static_cast<size_t>(world.rank())] = run.values(model).front();
         });
         EXPECT_TRUE(weights[0].equal(torch::ones({7})));
         EXPECT_TRUE(weights[1].equal(torch::ones({7})));
       }
     }});

// ---- what operators do with a layer that was cut ----

template <typename Use>
auto with_cut_net(const Use& use) {
  return [use](auto& run) {
    const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
    Net net = cut_net(mesh);
    DistributedDataParallel<Net> model(net, mesh, run.options);
    use(model);
  };
}

const int kInitialisesCut = is_refused(
    kGroup, "initialises a cut layer by `torch::nn::init`, after tensor_parallel()",
    "the weight of \"up\", which tensor_parallel() cut: expected no random numbers",
    "initialise the module before tensor_parallel()",
    [](auto& run) {
      const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
      Net net = cut_net(mesh);
      torch::nn::init::xavier_uniform_(net->up->weight);
    },
    kFirstAndLast);

const int kEinsum =
    is_refused(kGroup, "evaluates with `torch::einsum` of the weight of a cut layer",
               "got aten::einsum, which would see this rank's slice alone",
               "call the layer's forward()", with_cut_net([](auto& model) {
                 const torch::NoGradGuard no_grad;
                 torch::einsum("bi,oi->bo", {torch::ones({3, 7}), model->up->weight});
               }),
               kFirstAndLast);

struct ProductByHand : torch::autograd::Function<ProductByHand> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.mm(weight.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1]), gradients[0].t().mm(saved[0])};
  }
};

const int kFunctionOfOnesOwn = is_refused(
    kGroup, "gives the weight of a cut layer to a `torch::autograd::Function` of its own",
    "got aten::mm, which would see this rank's slice alone", "call the layer's forward()",
    with_cut_net([](auto& model) {
      ProductByHand::apply(torch::ones({3, 7}), model->up->weight).sum().backward();
    }),
    kFirstAndLast);

const int kSavesByTorch = is_refused(
    kGroup, "saves a cut module by `torch::save`", "expected a whole tensor, got this rank's slice",
    "`save_weights()` or `save_state()`", with_cut_net([](auto& model) {
      const GatheredParameters guard(model);
      std::ostringstream file;
      torch::save(model.module(), file);
    }),
    kFirstAndLast);

const int kNormOfCut = add_habit(
    {kGroup, "logs norms of all parameters, of which some are cut, and loads values of the whole",
     "", [] {
       const Net whole = make<Net>();
       for (const int stage : {0, 1, 2, 3}) {
         const Setting setting{.stage = stage, .mode = Mode::kFp32, .ranks = 2};
         SCOPED_TRACE(::testing::Message() << setting);
         run_ranks(2, [&](World& world) {
           OurRun run(world, setting);
           with_cut_net([&](auto& model) {
             const torch::NoGradGuard no_grad;
             const auto expected = whole->parameters();
             const auto parameters = model.parameters();
             for (size_t index = 0; index < expected.size(); ++index) {
               EXPECT_EQ(expected[index].norm().template item<float>(),
                         parameters[index].norm().template item<float>());
             }
             model->up->weight.copy_(2 * whole->up->weight);
             EXPECT_TRUE(torch::equal(2 * whole->up->weight, whole_of(model->up->weight)));
           })(run);
         });
       }
     }});

// ---- layers between a column and its row ----

// What two ranks that share slices train to, and one rank with the whole. before_step(parameters): before each.
template <typename M, typename Change, typename BeforeStep = decltype(kNothing)>
void expect_trains_as_whole(const TensorParallelPlan& plan, const Change& change,
                            const std::vector<int64_t>& sizes,
                            const BeforeStep& before_step = kNothing) {
  constexpr int kSteps = 3;
  constexpr double kRate = 0.02;
  const auto train = [&](auto& model, auto& optimizer, const auto& parameters) {
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      const torch::Tensor x = samples_of(0, step).inputs.repeat({4, 1}).view(sizes);
      model(x).square().sum().backward();
      before_step(parameters);
      optimizer.step();
    }
  };
  M whole = make<M>();
  change(whole);
  SGD plainly(whole->parameters(), SGDOptions(kRate));
  train(whole, plainly, whole->parameters());
  for (const int stage : {0, 3}) {
    SCOPED_TRACE(::testing::Message() << "stage " << stage);
    const Setting setting{.stage = stage, .mode = Mode::kFp32, .ranks = 2};
    run_ranks(2, [&](World& world) {
      OurRun run(world, setting);
      const Mesh mesh(world, {{"data", 1}, {"tensor", 2}});
      M cut = make<M>();
      change(cut);
      tensor_parallel(cut, mesh["tensor"], plan);
      DistributedDataParallel<M> model(cut, mesh, run.options);
      Optimizer<SGD> optimizer(model, SGDOptions(kRate));
      train(model, optimizer, model.parameters());
      const GatheredParameters guard(model);
      const auto parameters = cut->named_parameters();
      for (const auto& item : whole->named_parameters()) {
        const torch::Tensor actual = whole_of(parameters[item.key()]);
        EXPECT_LE((item.value().detach() - actual).abs().max().template item<float>(), 1e-5)
            << item.key();
      }
    });
  }
}

const int kPlannedBetween =
    add_habit({kGroup, "has a parameter between a column and its row, as `Cut::between()`", "", [] {
                 expect_trains_as_whole<Net>(
                     {{"up", Cut::column()}, {"between", Cut::between()}, {"down", Cut::row()}},
                     [](Net& net) { net->with_parameter_between = true; }, {12, 7});
               }});

const int kSlopes = is_refused(
    kGroup, "plans a PReLU with a slope for each feature as `Cut::between()`",
    "\"1.weight\", which the plan of tensor_parallel() has between a column and its row: expected "
    "an input of 8 features",
    "one slope, or a layer before the column or behind the row",
    [](auto& run) {
      const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
      torch::nn::Sequential net(torch::nn::Linear(7, 8),
                                torch::nn::PReLU(torch::nn::PReLUOptions().num_parameters(8)),
                                torch::nn::Linear(8, 7));
      tensor_parallel(net, mesh["tensor"],
                      {{"0", Cut::column()}, {"1", Cut::between()}, {"2", Cut::row()}});
      DistributedDataParallel<torch::nn::Sequential> model(net, mesh, run.options);
      model(samples_of(0, 0).inputs);
    },
    kFirstAndLast);

const int kPlannedOutside = is_refused(
    kGroup, "plans a layer as `Cut::between()` that is not",
    "which the plan of tensor_parallel() has between a column and its row: "
    "expected each of 2 ranks",
    "leave it out of the plan",
    [](auto& run) {
      const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
      Net net = make<Net>();
      tensor_parallel(net, mesh["tensor"],
                      {{"up", Cut::column()}, {"norm", Cut::between()}, {"down", Cut::row()}});
      DistributedDataParallel<Net> model(net, mesh, run.options);
      const Samples samples = samples_of(0, 0);
      loss_against(model(samples.inputs), samples.targets).backward();
    },
    kFirstAndLast);

// ---- gradients of layers that were cut, and tensors that are made of them ----

const TensorParallelPlan& plan_of_net() {
  static const TensorParallelPlan plan = {{"up", Cut::column()}, {"down", Cut::row()}};
  return plan;
}

const int kClipsSlices = add_habit(
    {kGroup, "clips what tensor_parallel() cut by `torch::nn::utils::clip_grad_norm_`", "", [] {
       expect_trains_as_whole<Net>(plan_of_net(), kNothing, {12, 7}, [](const auto& parameters) {
         torch::nn::utils::clip_grad_norm_(parameters, 0.1);
       });
     }});

const int kScalesGradients = add_habit(
    {kGroup, "scales the gradient of each layer by its norm and mean, of which some are cut", "",
     [] {
       expect_trains_as_whole<Net>(plan_of_net(), kNothing, {12, 7}, [](const auto& parameters) {
         const torch::NoGradGuard no_grad;
         for (const torch::Tensor& parameter : parameters) {
           torch::Tensor gradient = parameter.grad();
           if (!gradient.defined()) continue;
           gradient.div_(gradient.norm() + 1).sub_(gradient.mean(0, /*keepdim=*/true));
         }
       });
     }});

const int kFlattensGradients = is_refused(
    kGroup, "concatenates the gradients of all layers, of which some are cut",
    "the gradient of the weight of \"up\", which tensor_parallel() cut: expected the layer's "
    "forward(), or an operator that does the same to each element, got aten::flatten",
    "`whole_of(p.grad())`, or `own_slice(p.grad())`", with_cut_net([](auto& model) {
      loss_against(model(samples_of(0, 0).inputs), samples_of(0, 0).targets).backward();
      std::vector<torch::Tensor> all;
      for (const torch::Tensor& parameter : model.parameters()) {
        if (parameter.grad().defined()) all.push_back(parameter.grad().flatten());
      }
    }));

const int kOwnAverage = add_habit(
    {kGroup, "averages weights into tensors of its own, of which some are cut", "", [] {
       expect_trains_as_whole<Net>(plan_of_net(), kNothing, {12, 7}, [](const auto& parameters) {
         const torch::NoGradGuard no_grad;
         for (torch::Tensor parameter : parameters) {
           torch::Tensor average = torch::zeros_like(parameter);
           average.lerp_(parameter, 0.5).div_(1 + average.norm());
           parameter.lerp_(average, 0.1);
         }
       });
     }});

const int kNormsOfRows = add_habit(
    {kGroup, "divides weights by the norms of their rows, of which some are cut", "", [] {
       expect_trains_as_whole<Net>(plan_of_net(), kNothing, {12, 7}, [](const auto& parameters) {
         const torch::NoGradGuard no_grad;
         for (torch::Tensor parameter : parameters) {
           if (parameter.dim() > 1) parameter.div_(parameter.norm(2, 1, /*keepdim=*/true));
         }
       });
     }});

const int kSavesACopy = is_refused(
    kGroup, "saves a tensor of its own that it filled from the weight of a cut layer",
    "the weight of \"up\", which tensor_parallel() cut, or of a tensor that was made of it",
    "`save_weights()`, or `whole_of()`", with_cut_net([](auto& model) {
      const torch::NoGradGuard no_grad;
      const torch::Tensor weight = model->up->weight;
      std::ostringstream file;
      torch::save(torch::empty(weight.sizes()).copy_(weight), file);
    }));

const int kCopiesIntoABuffer =
    is_refused(kGroup, "copies the weight of a cut layer into a part of a buffer of its own",
               "which becomes this rank's slice too, got one that shares its memory with another",
               "copy `whole_of()`, or `own_slice()`", with_cut_net([](auto& model) {
                 const torch::NoGradGuard no_grad;
                 const torch::Tensor weight = model->up->weight;
                 torch::empty({weight.numel()}).view(weight.sizes()).copy_(weight);
               }));

const int kSavesAdamW = is_refused(
    kGroup, "updates a cut module by a `torch::optim::AdamW`, and saves that by `torch::save`",
    "which tensor_parallel() cut, or of a tensor that was made of it, as an optimizer's states are",
    "`zeropage::Optimizer`, and `save_state()`",
    [](auto& run) {
      const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
      Net net = cut_net(mesh);
      AdamW optimizer(net->parameters(), AdamWOptions(0.01));
      loss_against(net(samples_of(0, 0).inputs), samples_of(0, 0).targets).backward();
      optimizer.step();
      std::ostringstream file;
      torch::save(optimizer, file);
    },
    {.stages = {0}});

const int kInference =
    add_habit({kGroup, "evaluates a cut module in inference mode", "", [] {
                 Net whole = make<Net>();
                 const torch::Tensor x = samples_of(0, 0).inputs;
                 const torch::Tensor expected = whole(x).detach();
                 for (const int stage : {0, 3}) {
                   const Setting setting{.stage = stage, .mode = Mode::kFp32, .ranks = 4};
                   SCOPED_TRACE(::testing::Message() << setting);
                   run_ranks(4, [&](World& world) {
                     OurRun run(world, setting);
                     const Mesh mesh(world, {{"data", 2}, {"tensor", 2}});
                     DistributedDataParallel<Net> model(cut_net(mesh), mesh, run.options);
                     model.eval();
                     const c10::InferenceMode inference;
                     EXPECT_LE((model(x) - expected).abs().max().template item<float>(), 1e-6);
                     EXPECT_EQ(whole->up->weight.norm().template item<float>(),
                               model->up->weight.norm().template item<float>());
                   });
                 }
               }});

// ---- fewer heads of keys than of queries ----

constexpr int64_t kWidthOfHead = 4;
constexpr int64_t kQueryHeads = 12;
constexpr int64_t kKeyHeads = 3;

struct GroupedQueriesImpl : torch::nn::Module {
  GroupedQueriesImpl() {
    const int64_t width = 7;
    const auto plain = [&](const char* name, int64_t inputs, int64_t outputs) {
      return register_module(
          name, torch::nn::Linear(torch::nn::LinearOptions(inputs, outputs).bias(false)));
    };
    queries = plain("queries", width, kQueryHeads * kWidthOfHead);
    keys = plain("keys", width, kKeyHeads * kWidthOfHead);
    values = plain("values", width, kKeyHeads * kWidthOfHead);
    out = plain("out", kQueryHeads * kWidthOfHead, width);
  }
  torch::Tensor forward(const torch::Tensor& x) {  // [batch, tokens, width]
    const auto by_head = [&](torch::nn::Linear& layer) {
      return layer(x).view({x.size(0), x.size(1), -1, kWidthOfHead}).transpose(1, 2);
    };
    const torch::Tensor query = by_head(queries), key = by_head(keys), value = by_head(values);
    // Pairs them by as many queries a key as there are, like scaled_dot_product_attention() where it is told to.
    const auto repeated = [&](const torch::Tensor& heads) {
      const int64_t times = (query.size(1) + heads.size(1) - 1) / heads.size(1);
      return heads.repeat_interleave(times, 1).slice(1, 0, query.size(1));
    };
    const torch::Tensor mixed =
        at::scaled_dot_product_attention(query, repeated(key), repeated(value));
    return out(mixed.transpose(1, 2).flatten(2));
  }
  torch::nn::Linear queries{nullptr}, keys{nullptr}, values{nullptr}, out{nullptr};
};
TORCH_MODULE(GroupedQueries);

const int kUnevenKeys = is_refused(
    kGroup, "cuts queries of 12 heads and keys of 3 by 2 ranks",
    "\"keys\": expected units that 2 ranks divide, got 3 of 4 elements",
    "ranks that divide the heads of keys, or `uneven()` with a unit of all heads that share a key",
    [](auto& run) {
      const Mesh mesh(run.world(), {{"data", 1}, {"tensor", 2}});
      tensor_parallel(make<GroupedQueries>(), mesh["tensor"],
                      {{"queries", Cut::column().unit(kWidthOfHead)},
                       {"keys", Cut::column().unit(kWidthOfHead)},
                       {"values", Cut::column().unit(kWidthOfHead)},
                       {"out", Cut::row().unit(kWidthOfHead)}});
    },
    {.stages = {0}});

// One head of keys for all queries.
struct OneKeyImpl : torch::nn::Module {
  OneKeyImpl() {
    first = register_module("first", torch::nn::Linear(7, 7));
    queries = register_module("queries", torch::nn::Linear(7, kQueryHeads * kWidthOfHead));
    keys = register_module("keys", torch::nn::Linear(7, kWidthOfHead));
    values = register_module("values", torch::nn::Linear(7, kWidthOfHead));
    norm =
        register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidthOfHead})));
    out = register_module("out", torch::nn::Linear(kQueryHeads * kWidthOfHead, 7));
    slope = register_parameter("slope", torch::ones({1}));
  }
  torch::Tensor forward(const torch::Tensor& input) {  // [batch, tokens, width]
    const torch::Tensor x = torch::tanh(first(input));
    const auto by_head = [&](torch::nn::Linear& layer) {
      return layer(x).view({x.size(0), x.size(1), -1, kWidthOfHead}).transpose(1, 2);
    };
    const torch::Tensor query = norm(by_head(queries)) * slope;
    const torch::Tensor mixed = at::scaled_dot_product_attention(
        query, by_head(keys).expand_as(query), by_head(values).expand_as(query));
    return out(mixed.transpose(1, 2).flatten(2));
  }
  torch::nn::Linear first{nullptr}, queries{nullptr}, keys{nullptr}, values{nullptr}, out{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::Tensor slope;
};
TORCH_MODULE(OneKey);

const int kWholeKeys = add_habit(
    {kGroup,
     "keeps one head of keys and values whole, and norms each head of queries, as `Cut::between()`",
     "", [] {
       expect_trains_as_whole<OneKey>({{"queries", Cut::column().unit(kWidthOfHead)},
                                       {"keys", Cut::between()},
                                       {"values", Cut::between()},
                                       {"norm", Cut::between()},
                                       {"", Cut::between()},
                                       {"out", Cut::row().unit(kWidthOfHead)}},
                                      [](OneKey&) {}, {4, 3, 7});
     }});

const int kGroupsOfQueries =
    add_habit({kGroup,
               "cuts 12 heads of queries and 3 of keys by 2 ranks, `uneven()`, with units of heads "
               "that share a key",
               "", [] {
                 GroupedQueries whole = make<GroupedQueries>();
                 const torch::Tensor x = torch::linspace(-1, 1, 2 * 5 * 7).view({2, 5, 7});
                 const torch::Tensor expected = whole(x);
                 run_ranks(2, [&](World& world) {
                   GroupedQueries cut = make<GroupedQueries>();
                   const auto of_keys = kQueryHeads / kKeyHeads * kWidthOfHead;
                   tensor_parallel(cut, world,
                                   {{"queries", Cut::column().unit(of_keys).uneven()},
                                    {"keys", Cut::column().unit(kWidthOfHead).uneven()},
                                    {"values", Cut::column().unit(kWidthOfHead).uneven()},
                                    {"out", Cut::row().unit(of_keys).uneven()}});
                   EXPECT_LE((cut(x) - expected).abs().max().item<float>(), 1e-6);
                 });
               }});

// The same in one layer: the rows of queries, then of keys, then of values.
struct FusedQueriesImpl : torch::nn::Module {
  static constexpr int64_t kQueriesOfKey = 4;

  FusedQueriesImpl() {
    qkv = register_module("qkv",
                          torch::nn::Linear(7, (kQueriesOfKey + 2) * kKeyHeads * kWidthOfHead));
    out = register_module("out", torch::nn::Linear(kQueriesOfKey * kKeyHeads * kWidthOfHead, 7));
  }
  torch::Tensor forward(const torch::Tensor& x) {  // [batch, tokens, width]
    const torch::Tensor all = qkv(x);
    const int64_t of_keys = all.size(-1) / (kQueriesOfKey + 2);  // those that this rank has
    const auto parts = all.split_with_sizes({kQueriesOfKey * of_keys, of_keys, of_keys}, -1);
    const auto by_head = [&](const torch::Tensor& part) {
      return part.view({x.size(0), x.size(1), -1, kWidthOfHead}).transpose(1, 2);
    };
    const auto repeated = [&](const torch::Tensor& part) {
      return by_head(part).repeat_interleave(kQueriesOfKey, 1);
    };
    const torch::Tensor mixed =
        at::scaled_dot_product_attention(by_head(parts[0]), repeated(parts[1]), repeated(parts[2]));
    return out(mixed.transpose(1, 2).flatten(2));
  }
  torch::nn::Linear qkv{nullptr}, out{nullptr};
};
TORCH_MODULE(FusedQueries);

const int kFusedQueries = add_habit(
    {kGroup,
     "cuts one layer of 12 heads of queries and 3 of keys and values by 2 ranks, `uneven()`, as "
     "`parts({12, 3, 3})`",
     "", [] {
       expect_trains_as_whole<FusedQueries>(
           {{"qkv", Cut::column().parts({12, 3, 3}).unit(kWidthOfHead).uneven()},
            {"out", Cut::row().unit(FusedQueriesImpl::kQueriesOfKey * kWidthOfHead).uneven()}},
           kNothing, {4, 3, 7});
     }});

}  // namespace
}  // namespace zeropage::habits_of_meshes
