#include "zeropage/text/tokenizer.h"

#include <functional>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/text/small_vocabulary.h"
#include "zeropage/text/gguf_file.h"

namespace zeropage::text::tokenizer_test {
namespace {

using namespace zeropage::testing;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Words = std::vector<std::string>;

class TokenizerTest : public ::testing::Test {
 protected:
  Tokenizer gpt2() const {
    vocabulary_.put_gpt2(scratch_);
    return Tokenizer::from_path(scratch_.path());
  }
  Tokenizer from_json(const json& content) const {
    return Tokenizer::from_path(scratch_.put("tokenizer.json", content.dump()));
  }
  Tokenizer from_gguf(const GgufBytes& file) const {
    return Tokenizer::from_path(scratch_.put("model.gguf", file.text()));
  }
  std::string error_of(const json& content) const {
    return text_error_of([&] { from_json(content); });
  }
  // What tokenizer.json becomes with a pre-tokenizer.
  json with_cuts(const json& cuts) const {
    json content = vocabulary_.tokenizer_json();
    content["pre_tokenizer"] = cuts;
    return content;
  }
  static json split(const std::string& expression, const std::string& behavior = "Isolated",
                    bool invert = false) {
    return {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Split"},
               {"pattern", {{"Regex", expression}}},
               {"behavior", behavior},
               {"invert", invert}},
              {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  }

  // The tokens as bytes.
  static Words words(const Tokenizer& tokenizer, const std::string& text,
                     SpecialTokens special = SpecialTokens::kAsText) {
    Words found;
    for (const int32_t id : tokenizer.encode(text, special)) {
      found.emplace_back(tokenizer.bytes_of(id));
    }
    return found;
  }

  const TextScratch scratch_;
  SmallVocabulary vocabulary_;
};

TEST_F(TokenizerTest, JoinsThePairOfTheLowestRankFirst) {
  const Tokenizer tokenizer = gpt2();
  // "he" (rank 0) comes before "er" (rank 6), so "her" is not "h", "er".
  EXPECT_THAT(tokenizer.encode("her"), ElementsAre(256, 'r'));
  EXPECT_THAT(tokenizer.encode("hell"), ElementsAre(260));
  EXPECT_THAT(words(tokenizer, "the then hello"),
              ElementsAre("t", "he", " the", "n", " ", "hell", "o"));
  EXPECT_THAT(tokenizer.encode(""), ElementsAre());
}

TEST_F(TokenizerTest, ASpaceGoesToTheWordBehindIt) {
  EXPECT_THAT(words(gpt2(), "a   the\n\n12 2he's"),
              ElementsAre("a", "  ", " the", "\n", "\n", "12", " ", "2", "he", "'s"));
  // The last white space has no word behind it.
  EXPECT_THAT(words(gpt2(), "a\n\n"), ElementsAre("a", "\n\n"));
}

TEST_F(TokenizerTest, AllFormsOfAVocabularyAreTheSameTokenizer) {
  const Tokenizer from_pair = gpt2();
  const Tokenizer from_hugging_face = from_json(vocabulary_.tokenizer_json());
  json pairs = vocabulary_.tokenizer_json();
  for (json& pair : pairs["model"]["merges"]) {
    const auto text = pair.get<std::string>();
    pair = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
  }
  const Tokenizer with_pairs = from_json(pairs);
  const Tokenizer from_model = from_gguf(vocabulary_.gguf());
  const std::string text = "the hello then 12 her\n\n caf\u00e9<|endoftext|>";
  for (const Tokenizer* other : {&from_hugging_face, &with_pairs, &from_model}) {
    EXPECT_EQ(other->encode(text), from_pair.encode(text));
    EXPECT_EQ(other->vocabulary_size(), 270);
    EXPECT_EQ(other->vocabulary_hash(), from_pair.vocabulary_hash());
    EXPECT_EQ(other->document_end(), 267);
    EXPECT_EQ(other->missing_bytes(), "");
  }
  vocabulary_.merge("o", "o");
  EXPECT_NE(from_json(vocabulary_.tokenizer_json()).vocabulary_hash(), from_pair.vocabulary_hash());
}

TEST_F(TokenizerTest, HuggingFacesNamesOfThePairAreTakenToo) {
  vocabulary_.put_gpt2(scratch_);
  std::filesystem::rename(scratch_ / "encoder.json", scratch_ / "vocab.json");
  std::filesystem::rename(scratch_ / "vocab.bpe", scratch_ / "merges.txt");
  EXPECT_THAT(Tokenizer::from_path(scratch_.path()).encode("hell"), ElementsAre(260));
}

TEST_F(TokenizerTest, SpecialTokensAreTextUnlessTheyAreAskedFor) {
  const Tokenizer tokenizer = from_json(vocabulary_.tokenizer_json());
  const std::string text = "<|im_start|>he<|im_end|><|endoftext|";
  EXPECT_THAT(
      tokenizer.encode(text, SpecialTokens::kRecognised),
      ElementsAre(268, 256, 269, '<', '|', 'e', 'n', 'd', 'o', 'f', 't', 'e', 'x', 't', '|'));
  const std::vector<int32_t> plain = tokenizer.encode(text);
  EXPECT_EQ(plain.size(), text.size() - 1);  // "he" is one
  EXPECT_EQ(tokenizer.decode(plain), text);
  EXPECT_TRUE(tokenizer.is_special(268));
  EXPECT_FALSE(tokenizer.is_special(256));
  EXPECT_EQ(tokenizer.id_of("<|im_end|>"), 269);
  EXPECT_EQ(tokenizer.id_of(" the"), 258);
  EXPECT_EQ(tokenizer.id_of("absent"), std::nullopt);
}

TEST_F(TokenizerTest, AddedTokensThatAreNotSpecialAreAlwaysFoundTheLongestFirst) {
  json content = vocabulary_.tokenizer_json();
  content["added_tokens"].push_back(
      {{"id", 270}, {"content", "<tool>"}, {"special", false}, {"normalized", false}});
  content["added_tokens"].push_back(
      {{"id", 271}, {"content", "<tool>!"}, {"special", false}, {"normalized", false}});
  content["added_tokens"].push_back(
      {{"id", 272}, {"content", "end|>x"}, {"special", false}, {"normalized", false}});
  const Tokenizer tokenizer = from_json(content);
  EXPECT_THAT(tokenizer.encode("h<tool>!<tool>"), ElementsAre('h', 271, 270));
  // What begins within a special token is not found, whether that one is text or not.
  EXPECT_THAT(tokenizer.encode("<|im_end|>x", SpecialTokens::kRecognised), ElementsAre(269, 'x'));
  EXPECT_EQ(tokenizer.encode("<|im_end|>x").size(), 11U);
}

TEST_F(TokenizerTest, DigitsAndSplitsCutOneAfterTheOther) {
  const json digits = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Digits"}, {"individual_digits", true}},
        {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}}}};
  EXPECT_THAT(words(from_json(with_cuts(digits)), "the 12"), ElementsAre("t", "he", " ", "1", "2"));
  EXPECT_THAT(words(from_gguf(vocabulary_.gguf("smollm")), "the 12"),
              ElementsAre("t", "he", " ", "1", "2"));
  json runs = digits;
  runs["pretokenizers"][0]["individual_digits"] = false;
  EXPECT_THAT(words(from_json(with_cuts(runs)), "he12"), ElementsAre("he", "12"));
  // Without a cut of its own between "h" and "e", "he" would be a token.
  EXPECT_THAT(words(from_json(with_cuts(split("h"))), "hehe"), ElementsAre("h", "e", "h", "e"));
  // The rest of a text is no piece where matches are what is kept.
  EXPECT_THAT(words(from_json(with_cuts(split("he|ll", "Removed", true))), "hello"),
              ElementsAre("he", "ll"));
}

TEST_F(TokenizerTest, Llama3TakesThreeDigitsAndQwen2One) {
  const Tokenizer llama = from_gguf(vocabulary_.gguf("llama-bpe"));
  EXPECT_THAT(words(llama, "1212"), ElementsAre("12", "1", "2"));
  EXPECT_THAT(words(llama, "he'S\n\n the"), ElementsAre("he", "'", "S", "\n\n", " the"));
  EXPECT_THAT(words(from_gguf(vocabulary_.gguf("qwen2")), "12"), ElementsAre("1", "2"));
}

TEST_F(TokenizerTest, WholeWordsAreTakenWhereMergesAreIgnored) {
  vocabulary_.tokens.push_back("hex");  // no merge leads there
  json content = vocabulary_.tokenizer_json();
  EXPECT_THAT(words(from_json(content), "hex"), ElementsAre("he", "x"));
  content["model"]["ignore_merges"] = true;
  EXPECT_THAT(words(from_json(content), "hex"), ElementsAre("hex"));
}

TEST_F(TokenizerTest, NormalFormCIsMadeWhereTheTokenizerWantsIt) {
  json content = vocabulary_.tokenizer_json();
  const std::string apart = "cafe\u0301";
  EXPECT_EQ(from_json(content).decode(from_json(content).encode(apart)), apart);
  content["normalizer"] = {{"type", "NFC"}};
  const Tokenizer tokenizer = from_json(content);
  EXPECT_THAT(tokenizer.encode(apart), ElementsAre('c', 'a', 'f', 264));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("\xff" + apart + "\xc3")),
            "\xff"
            "caf\u00e9\xc3");
}

TEST_F(TokenizerTest, WhiteSpaceAndLettersAreThoseOfUnicode) {
  vocabulary_.merge("!", "\xE1");
  const Tokenizer tokenizer = from_json(vocabulary_.tokenizer_json());
  // U+180E is no white space any more, so it is in one word with the mark in front of it.
  EXPECT_EQ(words(tokenizer, "!\u180e").front(), "!\xE1");
  // A letter of Unicode 16 is one word with the "s" behind it, so "'s" is no contraction of its own.
  EXPECT_THAT(words(tokenizer, "'\U00010D4A's").back(), "'s");
  EXPECT_THAT(words(tokenizer, "\U00010D4Ahe").back(), "he");
}

TEST_F(TokenizerTest, AnyBytesComeBack) {
  std::mt19937 random(3);
  const Tokenizer tokenizer = gpt2();
  const Words odd = {"\xff\xfe",
                     "\xc3",
                     "he\xc3",
                     "\xc3\xa9\xa9",
                     "\xed\xa0\x80",
                     "\xf5\x80\x80\x80",
                     std::string("a\0b", 3),
                     "\xf0\x9f\x91",
                     "\xe0\x80\x80 the \xff"};
  for (const std::string& bytes : odd) {
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(bytes)), bytes);
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(bytes, SpecialTokens::kRecognised)), bytes);
  }
  for (int i = 0; i < 2000; ++i) {
    std::string bytes;
    const size_t size = random() % 200;
    while (bytes.size() < size)
      bytes += static_cast<char>(random() % 2 ? random() : 'a' + random() % 26);
    ASSERT_EQ(tokenizer.decode(tokenizer.encode(bytes)), bytes);
  }
}

TEST_F(TokenizerTest, BytesWithoutATokenAreLeftOutAndSaid) {
  json content = vocabulary_.tokenizer_json();
  content["model"]["vocab"].erase(alphabet_of(std::string("\x04")));
  const Tokenizer tokenizer = from_json(content);
  EXPECT_EQ(tokenizer.missing_bytes(), "\x04");
  // What is left becomes neighbours, as in the reference.
  EXPECT_THAT(tokenizer.encode("\x04\x04"), ElementsAre());
  EXPECT_THAT(words(tokenizer, "h\xff\x04"), ElementsAre("h", "\xff"));
}

// What BPE is by its definition: the lowest rank, leftmost, until there is none.
Words joined_by_definition(const SmallVocabulary& vocabulary, const std::string& word) {
  Words pieces;
  for (const char byte : word) pieces.push_back(alphabet_of(std::string(1, byte)));
  for (bool any = true; any;) {
    any = false;
    for (const auto& [left, right] : vocabulary.merges) {
      for (size_t i = 0; i + 1 < pieces.size() && !any; ++i) {
        if (pieces[i] != left || pieces[i + 1] != right) continue;
        pieces[i] += pieces[i + 1];
        pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(i) + 1);
        any = true;
      }
      if (any) break;
    }
  }
  return pieces;
}

TEST_F(TokenizerTest, WordsOfAnyLengthAreJoinedAsTheDefinitionSays) {
  // Merges over two letters, so that pairs overlap everywhere.
  std::mt19937 random(11);
  Words known = {"a", "b"};
  for (int i = 0; i < 60; ++i) {
    const std::string left = known[random() % known.size()];
    const std::string right = known[random() % known.size()];
    if (left.size() + right.size() > 12 ||
        std::find(known.begin(), known.end(), left + right) != known.end()) {
      continue;
    }
    vocabulary_.merge(left, right);
    known.push_back(left + right);
  }
  const Tokenizer tokenizer = from_gguf([&] {
    SmallVocabulary with_special_last = vocabulary_;
    std::rotate(with_special_last.tokens.begin() + 267, with_special_last.tokens.begin() + 270,
                with_special_last.tokens.end());
    return with_special_last.gguf();
  }());
  for (const size_t size : {1, 2, 3, 7, 40, 63, 64, 65, 66, 200, 1000}) {
    for (int i = 0; i < (size < 200 ? 20 : 2); ++i) {
      std::string word;
      while (word.size() < size) word += random() % 2 ? 'a' : 'b';
      ASSERT_EQ(words(tokenizer, word), joined_by_definition(vocabulary_, word)) << word;
    }
  }
}

TEST_F(TokenizerTest, APairIsForgottenWhenOneOfTheTwoIsJoinedToAnother) {
  // "ab" is a pair until "bc", which comes first, takes its "b".
  vocabulary_.merge("b", "c");
  vocabulary_.merge("a", "b");
  vocabulary_.merge("a", "bc");
  const Tokenizer tokenizer = from_json(vocabulary_.tokenizer_json());
  for (const int times : {1, 20, 21, 22, 200}) {
    std::string word;
    for (int i = 0; i < times; ++i) word += "abc";
    EXPECT_THAT(words(tokenizer, word),
                ::testing::AllOf(::testing::SizeIs(times), ::testing::Each("abc")));
  }
}

TEST_F(TokenizerTest, ALongWordAndALongRunOfSpacesEnd) {
  const Tokenizer tokenizer = gpt2();
  const std::string letters(2'000'000, 'l');
  EXPECT_EQ(tokenizer.encode(letters).size(), 1'000'000U);
  const std::string spaces(2'000'000, ' ');
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(spaces + "x")), spaces + "x");
  const Tokenizer llama = from_gguf(vocabulary_.gguf("llama-bpe"));
  EXPECT_EQ(llama.decode(llama.encode(spaces + "x")), spaces + "x");
}

TEST_F(TokenizerTest, AnExpressionThatTriesWithoutEndIsNamed) {
  const Tokenizer tokenizer = from_json(with_cuts(split("(a+a?)+[bc]")));
  EXPECT_THAT(text_error_of([&] { tokenizer.encode(std::string(60, 'a')); }),
              HasSubstr("tokenizer.json: its expression finds no match in a text of 60 bytes"));
}

TEST_F(TokenizerTest, LongTextsAreHandedOnInTurns) {
  const Tokenizer tokenizer = gpt2();
  std::string text;
  for (int i = 0; i < 100'000; ++i) text += " the hello";
  std::vector<int32_t> all;
  int turns = 0;
  tokenizer.encode(text, SpecialTokens::kAsText, [&](std::span<const int32_t> ids) {
    all.insert(all.end(), ids.begin(), ids.end());
    ++turns;
  });
  EXPECT_EQ(all, tokenizer.encode(text));
  EXPECT_GT(turns, 3);
}

TEST_F(TokenizerTest, ThreadsShareATokenizer) {
  const Tokenizer tokenizer = gpt2();
  std::string text;
  for (int i = 0; i < 2000; ++i) text += " the hello \u00e9 12\n";
  const std::vector<int32_t> expected = tokenizer.encode(text);
  std::vector<std::thread> threads;
  std::array<bool, 4> equal{};
  for (bool& result : equal) {
    threads.emplace_back([&] { result = tokenizer.encode(text) == expected; });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(equal, ::testing::Each(true));
}

TEST_F(TokenizerTest, AStreamShowsWholeCharacters) {
  const Tokenizer tokenizer = gpt2();
  StreamDecoder stream(tokenizer);
  Words shown;
  for (const int32_t id : tokenizer.encode("a\U0001f600\xff\u4e00\xe4"))
    shown.push_back(stream.add(id));
  EXPECT_THAT(shown, ElementsAre("a", "", "", "", "\U0001f600", "\xff", "", "", "\u4e00", ""));
  EXPECT_EQ(stream.finish(), "\xe4");
  EXPECT_EQ(stream.finish(), "");
  // What cannot become a character any more is shown.
  EXPECT_EQ(stream.add(0xe4), "");
  EXPECT_EQ(stream.add('h'), "\xe4h");
  // Half of a surrogate is no character.
  EXPECT_EQ(stream.add(0xed), "");
  EXPECT_EQ(stream.add(0xa0), "\xed\xa0");
}

TEST_F(TokenizerTest, NumbersThatTheVocabularyDoesNotHaveAreNamed) {
  const Tokenizer tokenizer = gpt2();
  EXPECT_THAT(text_error_of([&] {
                tokenizer.decode(std::vector<int32_t>{'a', 270});
              }),
              HasSubstr("encoder.json: expected the number of a token, from 0 to 269, got 270"));
  EXPECT_THAT(text_error_of([&] { tokenizer.bytes_of(-1); }), HasSubstr("got -1"));
}

TEST_F(TokenizerTest, KindsOfTokenizersThatAreNotReadAreNamed) {
  const auto with = [&](const char* path, const json& value) {
    json content = vocabulary_.tokenizer_json();
    content[json::json_pointer(path)] = value;
    return error_of(content);
  };
  EXPECT_THAT(with("/model/type", "Unigram"),
              HasSubstr("tokenizer.json: model.type: expected a byte-level BPE, got \"Unigram\""));
  EXPECT_THAT(with("/model/byte_fallback", true), HasSubstr("model.byte_fallback: expected false"));
  EXPECT_THAT(with("/model/dropout", 0.1), HasSubstr("model.dropout: expected none, got 0.1"));
  EXPECT_THAT(with("/model/end_of_word_suffix", "</w>"), HasSubstr("end_of_word_suffix"));
  EXPECT_THAT(
      with("/normalizer", {{"type", "Lowercase"}}),
      HasSubstr("normalizer: expected no normalizer, or NFC, got {\"type\":\"Lowercase\"}"));
  EXPECT_THAT(with("/pre_tokenizer", {{"type", "Metaspace"}}),
              HasSubstr("type Split, Digits or ByteLevel, got {\"type\":\"Metaspace\"}"));
  EXPECT_THAT(with("/pre_tokenizer", nullptr),
              HasSubstr("pre_tokenizer: expected one with ByteLevel"));
  EXPECT_THAT(with("/pre_tokenizer/add_prefix_space", true),
              HasSubstr("pre_tokenizer.add_prefix_space: expected false, got true"));
  EXPECT_THAT(with("/added_tokens/0/lstrip", true),
              HasSubstr("added_tokens[0].lstrip: expected false"));
  EXPECT_THAT(error_of(with_cuts({{"type", "Digits"}})), HasSubstr("ByteLevel, as the last"));
  EXPECT_THAT(error_of(with_cuts(split("a", "MergedWithNext"))),
              HasSubstr("the behavior Isolated"));
  EXPECT_THAT(error_of(with_cuts(split("(a"))), HasSubstr("the expression (a cannot be read"));
  EXPECT_THAT(error_of(with_cuts(split("\\w+"))),
              HasSubstr("has \\w, which engines read in several"));
  EXPECT_THAT(text_error_of([&] { from_gguf(vocabulary_.gguf("bert-bge")); }),
              HasSubstr("got \"bert-bge\"; take the model's tokenizer.json"));
  GgufBytes llama2;
  llama2.words("tokenizer.ggml.model", "llama");
  EXPECT_THAT(text_error_of([&] { from_gguf(llama2); }),
              HasSubstr("expected gpt2, a byte-level BPE"));
}

TEST_F(TokenizerTest, DamagedVocabulariesAreNamed) {
  const auto with = [&](const char* path, const json& value) {
    json content = vocabulary_.tokenizer_json();
    content[json::json_pointer(path)] = value;
    return error_of(content);
  };
  EXPECT_THAT(with("/model/vocab/h", -1), HasSubstr("token \"h\": expected a number from 0"));
  EXPECT_THAT(with("/model/vocab/h", 1'000'000'000), HasSubstr("got 1000000000"));
  EXPECT_THAT(with("/model/vocab/h", "x"), HasSubstr("expected an integer, got \"x\""));
  EXPECT_THAT(with("/model/vocab/h", 101), HasSubstr("expected one token"));
  EXPECT_THAT(with("/model/merges/0", "h e x"), HasSubstr("two tokens with a space between them"));
  EXPECT_THAT(with("/model/merges/1", "h zz"), HasSubstr("merge 1, \"h zz\""));
  EXPECT_THAT(with("/model/merges/1", {"h"}), HasSubstr("merges[1]: expected two tokens"));
  EXPECT_THAT(with("/added_tokens/0/id", 5), HasSubstr("expected it to agree with the vocabulary"));
  EXPECT_THAT(error_of(json::array()), HasSubstr("expected an object, got []"));
  EXPECT_THAT(error_of({{"model", 3}}), HasSubstr("expected"));
  const std::string whole = vocabulary_.tokenizer_json().dump();
  for (size_t size = 0; size < whole.size(); size += 97) {
    const auto path = scratch_.put("tokenizer.json", whole.substr(0, size));
    EXPECT_THAT(text_error_of([&] { Tokenizer::from_path(path); }), HasSubstr("expected JSON"))
        << size;
  }
  const auto path = scratch_.put("tokenizer.json", "{\"model\": 8e888888}");
  EXPECT_THAT(text_error_of([&] { Tokenizer::from_path(path); }),
              HasSubstr("expected JSON whose numbers a double holds, got a larger one"));
  EXPECT_THAT(text_error_of([&] { Tokenizer::from_path(scratch_ / "none"); }),
              HasSubstr("there is no such file"));
  const TextScratch empty;
  EXPECT_THAT(text_error_of([&] { Tokenizer::from_path(empty.path()); }),
              HasSubstr("expected a folder with tokenizer.json"));
  vocabulary_.put_gpt2(empty);
  empty.put("vocab.bpe", "#version: 0.2\nq z\n");
  EXPECT_THAT(text_error_of([&] { Tokenizer::from_path(empty.path()); }),
              AllOf(HasSubstr("vocab.bpe: does not fit its vocabulary"), HasSubstr("\"q z\"")));
}

}  // namespace
}  // namespace zeropage::text::tokenizer_test
