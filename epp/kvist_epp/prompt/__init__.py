"""From a request body to the bytes of its prompt, as the engine will tokenize it.

``request.parse`` reads the body, ``model.Model.prompts`` renders it with template and vocabulary.
A request that cannot be rendered as the engine does is matched by its plain text, in approximate mode.

- ``request``: parses a request by its path; the OpenAI chat and completion APIs, and vLLM's generate API.
- ``implied_path``: the path of a request whose gateway sends none, as its body implies it.
- ``responses_api``: parses the OpenAI Responses API as chats.
- ``messages_api``: parses the Anthropic Messages API as chats.
- ``pooling_requests``: parses requests to embedding, rerank and classification models.
- ``request_types``: the parsed request and the checks that all parsers share.
- ``chat``: messages as vLLM passes them to a chat template.
- ``chat_rules``: what engines change in a chat before they render it, by flags of theirs.
- ``tools``: tools as vLLM passes them to a chat template, parsed once for the same bytes.
- ``template``: a chat template, with bounded work, and the content format that it expects.
- ``template_environment``: the environment in which a chat template is compiled, and the budget of a render.
- ``template_loops``: loops over messages in the tree of a template, and the content format that they imply.
- ``deepseek``: chats of DeepSeek V3.2 and V4, which engines write by code and not by a template.
- ``deepseek_tools``: declarations of tools as these models read them, and their calls.
- ``harmony``: chats of gpt-oss, which engines write by code and not by a template.
- ``harmony_tools``: declarations of tools as gpt-oss reads them.
- ``mistral``: chats of engines that use Mistral's own tokenizer, which has no template.
- ``canonical_chunks``: a cheap check of generated tokens, chunk by chunk.
- ``text_cuts``: places where a tokenizer cuts every text.
- ``tiktoken_vocab``: vocabularies of tokens with ranks: those of Mistral's own tokenizer and of Kimi's.
- ``kimi``: chats of Kimi K2, whose tokenizer prepares tools for the template.
- ``kimi_tools``: declarations of tools as Kimi K2.5 reads them.
- ``media_texts``: what engines put into prompts in place of media, learned from their events.
- ``plain_text``: the text of a request whose prompt is not known.
- ``tool_texts``: declarations of tools, which are written once for a list of tools.
- ``checkpoints``: prompts of long chats, and the places in them from which the next turn is rendered.
- ``resumed_render``: a render that begins with a later message.
- ``render_plan``: plans for chats of known shapes, which are rendered without running the template.
- ``render_trace``: the environment that watches what a template does with contents, of which a plan is made.
- ``traced_values``: contents and arguments of calls that note what is done with them.
- ``vocab``: the bytes of each token of a tokenizer.
- ``model_files``: the files of a model: where they come from, and what engines read in them.
- ``model``: a model: its chats and its vocabulary.
"""
