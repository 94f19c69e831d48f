"""The text small vocabularies are trained on and round trips are tried with: ours, several scripts, code."""

PARAGRAPHS = (
    "A router that knows which pod holds which prefix sends each request where the least work is left.",
    "The prompt is rendered once, matched as bytes, and the engine's own events say what is really cached.",
    "The quick brown fox jumps over the lazy dog; 1,234,567 times in 2026, said the fox's friend's brother.",
    "Kvist är svenska för en liten gren: på kvisten sitter ett löv, och lövet är ett block av sexton ord.",
    "Der Zweig trägt Blätter, größere Äste tragen Zweige, und übermäßig schöne Bäume gibt es überall.",
    "Ветка держит листья, а дерево держит ветки; так и кеш держит блоки, а блоки держат слова.",
    "木の枝には葉があり、葉は一つの塊です。予測と事実を毎回比べて、ずれたら知らせます。",
    "树枝上有叶子，每片叶子都是一个缓存块。请求被送到已经缓存了前缀的地方。",
    "शाखा पर पत्ते होते हैं और हर पत्ता एक खंड है।",
    "على الغصن أوراق، وكل ورقة كتلة من الذاكرة.",
    "def match(tree, prompt):\n    node = tree\n    while node := node.child(prompt):\n        yield node\n",
    '{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Göteborg"}}}',
    "SELECT name, count(*) FROM blocks WHERE medium = 'GPU' GROUP BY name;\n\n\t-- a tab, two newlines\n",
    "Emoji too: 🌿 🍂 👩🏽‍💻 🇸🇪 and combining marks: e\u0301 a\u030a n\u0303.",
)

SAMPLES = (
    *PARAGRAPHS,
    "",
    " ",
    "   three spaces before, two after  ",
    "\n\n\n",
    "a\tb\t\tc\r\nd",
    "no-break\u00a0space, ideographic\u3000space, zero\u200bwidth",
    "ligature \ufb01, full width ＡＢＣ, superscript ², Å (angstrom sign \u212b)",
    "▁ lower one eighth block ▁▁ and <0x41> as text",
    "<s> </s> <|im_start|> not a role",
    "𝕬𝖓 astral plane 𐍈, Hangul 한국어 조합, Thai ภาษาไทย",
    "\x00\x01\x7f control \u0085 next line",
    "x" * 300,
)
